"""Programs of tests/programs in tasks of `run_tasks`; their variable `result` comes back."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist_ext.testing import run_tasks

PROGRAMS = Path(__file__).parent / "programs"
# In PYTHONPATH it keeps Keras from importing matplotlib, scikit-learn and pandas, which would take
# more than a second of each start.
LEFT_OUT_OF_RAY = str(Path(__file__).parent / "left_out")
LEFT_OUT = f"{LEFT_OUT_OF_RAY}:{LEFT_OUT_OF_RAY}/more"
CLUSTERS = ("TF_CONFIG", "TPU_", "SLURM_", "OMPI_", "SM_", "JOB_COMPLETION_INDEX", "TFDIST_")


def results_of(
    program: str,
    *args: str,
    cluster: Mapping[str, int] | int | None = None,
    timeout: float,
) -> list[Any]:
    """Run a program once in each task.

    Args:
        args: arguments of its command line.
        cluster: as of `run_tasks`; None: one process without TF_CONFIG.

    Returns:
        What each task has in its variable `result` at the end, in the order of tasks.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(CLUSTERS)}
    command = [str(PROGRAMS / program), *args]
    results = run_tasks(_run, cluster, timeout, args=(command,), env=env)
    return [json.loads(result) for result in results.values()]


_variables: dict[str, Any] = {}  # of the program: a server blocks where it is deleted


def _run(command: list[str]) -> str:
    sys.argv = command
    sys.path.insert(0, str(PROGRAMS))
    _variables.update(runpy.run_path(command[0], run_name="__main__"))
    # As JSON: the test gets numbers and text, and no objects of Keras.
    return json.dumps(_variables["result"])
