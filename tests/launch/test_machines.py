"""`tfdist run --nodes`: several agents on this machine, each as on a machine of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.machines.layout import Layout, parse_endpoint, parse_places
from tfdist_ext.launch.ports import reserve_ports

pytestmark = pytest.mark.timeout(60)

# What each task runs: $n is how many starts were before, $me its index, $job its type.
HEAD = """
n=$TFDIST_RESTARTS
me=$(echo "$TF_CONFIG" | sed 's/.*"index": \\([0-9]*\\).*/\\1/')
job=$(echo "$TF_CONFIG" | sed 's/.*"type": "\\([a-z]*\\)".*/\\1/')
"""


class Agent:
    """A node of a run, as it is started on its machine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out = self.err = ""

    def ended(self, seconds: float = 40) -> int:
        """Its exit status, once it has ended."""
        self.out, self.err = self.process.communicate(timeout=seconds)
        return self.process.returncode

    @property
    def tasks(self) -> set[str]:
        """Those that have written something."""
        return set(re.findall(r"^\[(\w+:\d+)\]", self.out, re.M))


class Nodes(NamedTuple):
    """Starts agents: `nodes.start(script, *options)`."""

    tfdist: Callable[..., subprocess.Popen[str]]
    at: str

    def start(
        self,
        script: str,
        *options: str,
        count: int = 2,
        only: Sequence[int] | None = None,
        own: dict[int, list[str]] | None = None,
        **env: str,
    ) -> list[Agent]:
        """One for each node, or for `only` some; `own` are options of single nodes."""
        head = ["run", "--nodes", str(count), "--rendezvous", self.at]
        return [
            Agent(
                self.tfdist(
                    *head,
                    *("--node-rank", str(node), *options, *(own or {}).get(node, [])),
                    *("--", "sh", "-c", HEAD + script),
                    **env,
                )
            )
            for node in (range(count) if only is None else only)
        ]


@pytest.fixture
def nodes(tfdist: Any) -> Any:
    with reserve_ports(1) as (port,):
        yield Nodes(tfdist, f"127.0.0.1:{port}")


def wait_for(path: Path) -> str:
    """What is in a file, once it is there."""
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)
    return path.read_text()


# One run


def test_tasks_are_on_their_machines_and_know_all_addresses(nodes: Nodes) -> None:
    script = """echo "$TF_CONFIG"; [ $job = chief ] && sleep 1 || sleep 30"""
    options = ("--workers-per-node", "2", "--ps", "2", "--evaluator", "--linger", "0")
    own = {node: ["--ports", f"2{node}100-2{node}119"] for node in range(3)}
    agents = nodes.start(script, *options, count=3, own=own)
    assert [agent.ended() for agent in agents] == [0, 0, 0]
    assert [agent.tasks for agent in agents] == [
        {"chief:0", "worker:0", "worker:1", "ps:0"},
        {"worker:2", "worker:3", "ps:1"},
        {"worker:4", "worker:5", "evaluator:0"},
    ]
    configs = [
        json.loads(line.split("] ", 1)[1]) for agent in agents for line in agent.out.splitlines()
    ]
    clusters = [each["cluster"] for each in configs if each["task"]["type"] != "evaluator"]
    assert all(each == clusters[0] for each in clusters)
    assert {job: len(addresses) for job, addresses in clusters[0].items()} == {
        "chief": 1,
        "worker": 6,
        "ps": 2,
    }
    addresses = [address for each in clusters[0].values() for address in each]
    assert len(set(addresses)) == 9
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    assert [20100 <= port < 20120 for port in ports].count(True) == 4
    assert [21100 <= port < 21120 for port in ports].count(True) == 3
    assert [22100 <= port < 22120 for port in ports].count(True) == 2


def test_the_first_failure_of_all_is_the_cause_on_every_machine(
    nodes: Nodes, tmp_path: Path
) -> None:
    script = "[ $me = 3 ] && sleep 1 && echo boom && exit 3; sleep 30"
    own = {node: ["--log-dir", str(tmp_path / f"node{node}")] for node in (0, 1)}
    agents = nodes.start(script, "--workers-per-node", "2", own=own)
    assert [agent.ended() for agent in agents] == [3, 3]
    for node, agent in enumerate(agents):
        assert "tfdist: worker:3 failed first, after" in agent.err
        assert "    boom\n" in agent.err
        assert f"tfdist: its log: 127.0.0.1:{tmp_path}/node1/worker-3.log\n" in agent.err
        result = json.loads((tmp_path / f"node{node}" / "result.json").read_text())
        assert (result["failed_task"], result["status"]) == ("worker:3", 3)
    assert (tmp_path / "node1" / "worker-3.log").read_text() == "boom\n"


def test_who_fails_because_of_a_task_of_another_machine_is_not_the_cause(nodes: Nodes) -> None:
    blames = "sleep 0.5; echo PeerError: worker:1 left at 12:00; exit 1"
    agents = nodes.start(f"if [ $me = 0 ]; then {blames}; fi; sleep 1; exit 5")
    assert [agent.ended() for agent in agents] == [5, 5]
    assert "tfdist: worker:1 failed first" in agents[0].err
    assert "tfdist: worker:0 failed because of worker:1" in agents[1].err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_on_any_machine_ends_all(
    nodes: Nodes, tmp_path: Path, number: int, status: int
) -> None:
    script = f"trap 'touch {tmp_path}/saved-'$me'; exit 143' TERM; echo > {tmp_path}/$me; "
    agents = nodes.start(script + "while :; do sleep 0.1; done", "--max-restarts", "3")
    for me in (0, 1):
        deadline = time.monotonic() + 20
        while not (tmp_path / str(me)).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    os.kill(agents[1].process.pid, number)
    assert [agent.ended(20) for agent in agents] == [status, status]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "saved-0", "saved-1"}


def test_a_program_that_is_missing_on_one_machine_is_named_on_all(nodes: Nodes) -> None:
    agents = nodes.start("sleep 30", own={1: ["--log-dir", "/proc/nowhere"]})
    assert [agent.ended() for agent in agents] == [2, 2]
    for agent in agents:
        assert "node 1 (127.0.0.1): the log file of worker:1 cannot be written" in agent.err


# Starting again


def test_all_machines_start_again(nodes: Nodes) -> None:
    # It dies when the other one has long printed its line, too.
    script = """echo $n "$TF_CONFIG"; [ $n = 1 ] && exit 0
    [ $me = 1 ] && sleep 1 && kill -9 $$; sleep 30"""
    agents = nodes.start(script, "--max-restarts", "2")
    assert [agent.ended() for agent in agents] == [0, 0]
    for me, agent in enumerate(agents):
        assert "tfdist: restart 1 of 2\n" in agent.err
        ports = re.findall(rf'^\[worker:{me}\] \d .*?:(\d+)"', agent.out, re.M)
        assert len(set(ports)) == 2  # others in each start


def test_a_worker_that_fails_again_and_again_is_left_out(nodes: Nodes) -> None:
    script = """echo $n $(echo "$TF_CONFIG" | tr -cd : | wc -c)
    [ $n -lt 2 ] && [ $me = 1 ] && sleep 0.5 && kill -9 $$; [ $n = 2 ] && exit 0; sleep 30"""
    options = ("--workers-per-node", "1", "--max-restarts", "3", "--min-workers", "2")
    agents = nodes.start(script, *options, count=3)
    assert [agent.ended() for agent in agents] == [0, 0, 0]
    assert "worker 1 has failed 2 times in a row and is left out: 2 workers" in agents[1].err
    assert "[worker:1] 2 " in agents[2].out  # as the second of two
    assert " 2 " not in agents[1].out


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_machine_that_is_lost_is_noticed_in_5_s_and_comes_back(
    nodes: Nodes, tmp_path: Path, how: str
) -> None:
    script = f"date +%s.%N > {tmp_path}/$n-$me; [ $n = 1 ] && sleep 1 && exit 0; sleep 60"
    agents = nodes.start(script, "--max-restarts", "2", count=3)
    for me in range(3):
        wait_for(tmp_path / f"0-{me}")
    lost, began = agents[2].process, time.monotonic()
    os.kill(lost.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "killed":
        agents[2].ended()
        agents += nodes.start(script, "--max-restarts", "2", count=3, only=[2])
    else:
        time.sleep(7)  # node 0 has noticed by now
        os.kill(lost.pid, signal.SIGCONT)
    wait_for(tmp_path / "1-0")
    assert time.monotonic() - began < 16
    left = agents if how == "stopped" else [agents[0], agents[1], agents[3]]
    assert [agent.ended() for agent in left] == [0, 0, 0]
    assert "node 2 (127.0.0.1) is lost: " in agents[0].err
    assert "worker:2 failed first, after" in agents[1].err
    assert "lost with its machine, node 2 (127.0.0.1)" in agents[1].err
    seconds = float(re.findall(r"worker:2 failed first, after ([\d.]+) s", agents[0].err)[0])
    assert seconds < 7  # since the start; the machine was lost in its first second or two


def test_the_others_go_on_without_a_machine_that_does_not_come_back(
    nodes: Nodes, tmp_path: Path
) -> None:
    script = f"touch {tmp_path}/$n-$me; [ $n = 1 ] && exit 0; sleep 60"
    options = ("--max-restarts", "2", "--min-workers", "2", "--rendezvous-timeout", "8")
    agents = nodes.start(script, *options, count=3)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(agents[2].process.pid, signal.SIGKILL)
    agents[2].ended()
    assert [agent.ended() for agent in agents[:2]] == [0, 0]
    assert "node 2 does not come back: going on with 2 workers" in agents[1].err


def test_where_node_0_is_lost_the_others_end(nodes: Nodes, tmp_path: Path) -> None:
    agents = nodes.start(f"touch {tmp_path}/$me; sleep 60")
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(agents[0].process.pid, signal.SIGKILL)
    agents[0].ended()
    assert agents[1].ended(15) == 138
    assert "node 0 (127.0.0.1:" in agents[1].err
    assert "the tasks of this machine have ended" in agents[1].err


# Meeting


def test_another_token_is_refused_and_the_right_one_is_taken(nodes: Nodes) -> None:
    agents = nodes.start("exit 0", only=[0], TFDIST_RENDEZVOUS_TOKEN="right")
    wrong = nodes.start("exit 0", only=[1], TFDIST_RENDEZVOUS_TOKEN="wrong")[0]
    assert wrong.ended() == 2
    assert "the token of the rendezvous must be the same on all machines" in wrong.err
    agents += nodes.start("exit 0", only=[1], TFDIST_RENDEZVOUS_TOKEN="right")
    assert [agent.ended() for agent in agents] == [0, 0]
    assert "a node at 127.0.0.1 is refused: the token" in agents[0].err
    assert "right" not in agents[0].err + wrong.err


def test_the_token_is_not_in_the_environment_of_tasks(nodes: Nodes) -> None:
    agents = nodes.start(
        "printenv TFDIST_RENDEZVOUS_TOKEN || echo none", TFDIST_RENDEZVOUS_TOKEN="secret"
    )
    assert [agent.ended() for agent in agents] == [0, 0]
    assert [agent.out.split() for agent in agents] == [
        ["[worker:0]", "none"],
        ["[worker:1]", "none"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers-per-node", "2"], "--workers-per-node must be the same on all machines"),
        (["--ps", "1"], "--ps must be the same on all machines, got 1 on node 1 and 0 on node 0"),
    ],
)
def test_other_options_are_refused(nodes: Nodes, options: list[str], message: str) -> None:
    short = ["--rendezvous-timeout", "3"]
    agents = nodes.start("exit 0", *short, own={1: options})
    assert [agent.ended() for agent in agents] == [2, 2]
    assert message in agents[1].err
    assert message in agents[0].err
    assert "within 3 s (--rendezvous-timeout), got no node 1" in agents[0].err


def test_rubbish_at_the_rendezvous_harms_nobody(nodes: Nodes) -> None:
    (agent,) = nodes.start("exit 0", only=[0])
    host, _, port = nodes.at.rpartition(":")
    deadline = time.monotonic() + 20
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
        b'{"nonce": [1]}\n',
        b"[" * 10_000 + b"\n",
    ):
        while True:
            try:
                connection = socket.create_connection((host, int(port)), 5)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with connection:
            connection.sendall(data)
            connection.recv(1000)
    (other,) = nodes.start("exit 0", only=[1])
    assert [agent.ended(), other.ended()] == [0, 0]
    assert "Traceback" not in agent.err


def test_the_environment_says_where_too(tfdist: Any) -> None:
    with reserve_ports(1) as (port,):
        env = {"TFDIST_NODES": "2", "TFDIST_RENDEZVOUS": f"127.0.0.1:{port}"}
        command = ("run", "--", "sh", "-c", "echo there")
        agents = [Agent(tfdist(*command, TFDIST_NODE_RANK=str(node), **env)) for node in (0, 1)]
        assert [agent.ended() for agent in agents] == [0, 0]
    assert [agent.out for agent in agents] == ["[worker:0] there\n", "[worker:1] there\n"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nodes 2", "--nodes 2 must come with --node-rank and --rendezvous HOST:PORT"),
        ("--nodes 2 --node-rank 2 --rendezvous h:1", "--node-rank must be from 0 to 1, got 2"),
        ("--nodes 2 --node-rank 0 --rendezvous h", "--rendezvous must be HOST:PORT, got 'h'"),
        ("--nodes 2 --workers 3", "--nodes must come with --workers-per-node, got --workers 3"),
        ("--nodes 0", "--nodes must be a number of at least 1, got 0"),
        ("--node-rank 1", "--node-rank must come with --nodes"),
        ("--nodes 2 --ps 1 --place ps=2", "--place ps must name nodes from 0 to 1, got [2]"),
        ("--nodes 2 --ps 2 --place ps=1", "must name a node for each of its 2 tasks, got 1"),
        ("--nodes 2 --place worker=1", "--place must name one of chief, ps, evaluator"),
        ("--nodes 2 --place ps", "--place must be a job and its nodes, as in ps=1,2, got 'ps'"),
        (
            "--nodes 2 --node-rank 0 --rendezvous no.such.host.invalid:3",
            "--rendezvous must name a host that can be resolved, got 'no.such.host.invalid'",
        ),
    ],
)
def test_wrong_options_are_named(tfdist: Any, words: str, message: str) -> None:
    agent = Agent(tfdist("run", *words.split(), "--", "sh", "-c", "exit 0"))
    assert agent.ended() == 2
    assert message in agent.err
    assert "Traceback" not in agent.err


# Arithmetic


@given(
    nodes=st.integers(1, 20),
    per_node=st.integers(1, 8),
    ps=st.integers(0, 12),
    evaluator=st.booleans(),
)
def test_every_task_has_one_machine(nodes: int, per_node: int, ps: int, evaluator: bool) -> None:
    layout = Layout(nodes, per_node, ps=ps, evaluator=evaluator)
    places = layout.nodes_of(range(layout.workers))
    assert [places["worker"].count(node) for node in range(nodes)] == [per_node] * nodes
    assert places["worker"] == sorted(places["worker"])  # neighbors are on one machine
    counts = [places.get("ps", []).count(node) for node in range(nodes)]
    assert sum(counts) == ps
    assert max(counts) - min(counts) <= 1
    assert places.get("chief", []) == ([0] if ps else [])
    assert places.get("evaluator", []) == ([nodes - 1] if evaluator else [])
    without = layout.workers_without([nodes - 1], range(layout.workers))
    assert len(without) == (nodes - 1) * per_node
    assert layout.needed >= {0} | {node for node in range(nodes) if counts[node]}


def test_places_are_those_that_were_asked_for() -> None:
    places = parse_places(["ps=2,2", "evaluator=0"])
    layout = Layout(3, 1, ps=2, evaluator=True, places=places)
    found = layout.nodes_of(range(3))
    assert (found["ps"], found["evaluator"], found["chief"]) == ([2, 2], [0], [0])
    assert layout.needed == {0, 2}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node0:29400", ("node0", 29400)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
        ("node0", None),
        ("node0:", None),
        ("node0:0", None),
        ("node0:65536", None),
        ("fd00::1:29400", None),
        (":29400", None),
        ("http://node0:29400", None),
    ],
)
def test_endpoints(text: str, found: tuple[str, int] | None) -> None:
    if found is not None:
        assert parse_endpoint(text) == found
        return
    with pytest.raises(LaunchError, match="--rendezvous must be HOST:PORT"):
        parse_endpoint(text)
