"""A table on parameter servers is never in the coordinator's memory: made, saved, and restored."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from warm_programs import run_together

from tfdist_ext.launch.plan import local_plan

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
