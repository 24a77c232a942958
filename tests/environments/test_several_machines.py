"""Three machines with addresses of their own; the link of one is cut and comes back."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import namespaces
import pytest
import ssh_machines
from conftest import (
    PATH,
    TFDIST,
    Result,
    Starter,
    assert_equal,
    result_in,
    training,
    write_files_of,
)
from pages import commands_of

pytestmark = [
    pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT or "-"),
    pytest.mark.timeout(240),
]
EPOCHS, STEPS = 4, 40
OPTIONS = ("--max-restarts", "4", "--min-workers", "2", "--grow-after", "6")


def test_a_machine_that_is_cut_off_and_comes_back(
    start: Starter, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """The others go on without it at the same numbers, and all of them when it is back."""
    expected = undisturbed(EPOCHS, STEPS)
    with namespaces.hosts(3) as hosts:
        at = f"{hosts.addresses[0]}:29400"
        agents = [
            start(
                *hosts.command(node, TFDIST, "run", "--nodes", "3", "--node-rank", str(node)),
                *("--rendezvous", at, *OPTIONS, "--log-dir", str(tmp_path / f"node{node}")),
                *("--", *training(tmp_path, EPOCHS, STEPS, 0.1)),
            )
            for node in range(3)
        ]
        agents[0].wait_for("] STEP 45\n")
        hosts.cut(2)
        cut = time.monotonic()
        agents[0].wait_for("node 2 (")
        noticed = time.monotonic() - cut
        agents[0].wait_for("node 2 does not come back: going on with 2 workers")
        hosts.mend(2)
        assert [agent.ended() for agent in agents] == [0, 0, 0]
    print(f"a machine that is cut off is noticed after {noticed:.1f} s")
    assert noticed < 5.5
    assert "is lost: no word from it for 4 s" in agents[1].output  # all tell of it
    assert "node 0 (" in agents[2].output
    assert "the tasks of this machine have ended" in agents[2].output
    assert "going on with all 3 workers" in agents[2].output
    assert_equal(result_in(tmp_path), expected)


PAGE = "docs/several_machines.md"


def test_the_commands_of_the_page(start: Starter, tmp_path: Path) -> None:
    """Its two lines on two machines, then the one of ssh, which goes on where they ended."""
    first, second, by_ssh = (shlex.split(command) for command, _ in commands_of(PAGE))
    write_files_of(PAGE, tmp_path)
    with namespaces.hosts(2) as hosts:
        at = f"{hosts.addresses[0]}:29400"
        for node, words in enumerate((first, second)):
            words[words.index("10.0.0.4:29400")] = at
            start(*hosts.command(node, TFDIST, *words[1:]), cwd=tmp_path)
        run, other = start.processes
        assert [run.ended(), other.ended()] == [0, 0], run.output + other.output
    assert "[worker:0] Epoch 5/5" in run.output
    assert "tfdist: node 1 (" in other.output
    (tmp_path / "model.keras").unlink()
    with ssh_machines.ssh_machines(tmp_path, 2) as machines:
        hosts_file = tmp_path / "hosts.toml"
        listed = ", ".join(f'"{address}"' for address in machines.addresses)
        text = f'hosts = [{listed}]\ndirectory = "{tmp_path}"\ntfdist = "{TFDIST}"\n'
        text += f'env = {{PATH = "{PATH}"}}\n'
        hosts_file.write_text(text)
        again = start(TFDIST, by_ssh[1], "--ssh", machines.ssh, *by_ssh[2:], cwd=tmp_path)
        assert again.ended() == 0, again.output
    assert "is complete after 5 epochs; nothing to do" in again.output
    assert (tmp_path / "model.keras").exists()
