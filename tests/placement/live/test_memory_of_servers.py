"""Memory of a large table: of the coordinator, of its servers, and in the memory of a host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from warm_programs import run_together

from tfdist_ext.launcher.plan import local_plan

ROOT = Path(__file__).parents[3]
MIB = 2**20
TABLE = 512 * MIB


def test_the_coordinator_holds_blocks_at_most(tmp_path: Path) -> None:
    """The program of the benchmark, on a smaller table. Blocks of a checkpoint are of 16 MiB."""
    program = ROOT / "benchmarks" / "programs" / "placement_memory.py"
    command = [sys.executable, str(program), "tfdist_ext", str(TABLE // 256)]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with local_plan(command, workers=1, ps=4, env=env) as plan:
        statuses, logs = run_together(plan, tmp_path, env, timeout=200)
    log = logs["chief:0"]
    assert statuses["chief:0"] == 0, log[-3000:]
    peaks = dict(re.findall(r"^peak of (.*): (\d+) MiB$", log, re.MULTILINE))
    assert list(peaks) == ["creation", "save_checkpoint", "restore_checkpoint as a whole"]
    assert int(peaks["creation"]) < 100
    assert max(map(int, peaks.values())) < 400


def run(tmp_path: Path, servers: int, *arguments: str) -> tuple[dict[str, dict[str, int]], str]:
    """(peak MiB of each task by phase, the log) of the benchmark's program."""
    program = str(ROOT / "benchmarks" / "programs" / "embedding_memory.py")
    folder = tmp_path / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    kind, rows, optimizer, epochs, limit = arguments
    command = [sys.executable, program, kind, rows, optimizer, str(folder), epochs, limit, "{}"]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if servers:
        with local_plan(command, workers=1, ps=servers, env=env) as plan:
            statuses, logs = run_together(plan, tmp_path, env, timeout=200)
        status, log = statuses["chief:0"], logs["chief:0"]
    else:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        status, log = done.returncode, done.stdout + done.stderr
    assert status == 0, log[-3000:]
    peaks = re.findall(r"^peak MiB of ([^:]*): (.*)$", log, re.MULTILINE)
    return {phase: json.loads(text) for phase, text in peaks}, log


def test_servers_need_the_memory_of_the_plan_and_the_chief_less_than_the_tables(
    tmp_path: Path,
) -> None:
    """Two tables of 256 MiB on two servers; the chief may allocate 400 MiB more than at its start.

    Each server makes its 256 MiB of random rows in place.
    """
    for epochs in (1, 2):
        arguments = ("parameter_server", str(2 * MIB), "sgd", str(epochs), "400")
        peaks, log = run(tmp_path, 2, *arguments)
        assert f"steps {epochs * 200}" in log  # the second run resumes
        memory = re.findall(r"^memory MiB: (.*)$", log, re.MULTILINE)[-1]  # of this run
        for server, needed in zip(("ps 0", "ps 1"), json.loads(memory), strict=True):
            before = peaks["start"][server]
            assert before + 230 < peaks["build"][server] < before + 256 + 64
            assert max(peak[server] for peak in peaks.values()) <= needed


def test_tables_in_the_memory_of_the_host_are_not_copied(tmp_path: Path) -> None:
    """Two tables of 256 MiB; graphs and blocks need up to 192 MiB more than a server's."""
    for kind, epochs in (("placed", 1), ("placed", 2), ("central_storage", 1)):  # 2: resumes
        peaks, log = run(tmp_path / kind, 0, kind, str(2 * MIB), "sgd", str(epochs), "0")
        assert f"steps {epochs * 200}" in log
        more = max(peak["chief"] for peak in peaks.values()) - peaks["start"]["chief"]
        assert 512 < more < 1.15 * 512 + 192
