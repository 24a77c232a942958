"""Start a cluster on this machine, watch it, and end it: what `tfdist run` does.

    with reserve_ports(addresses_needed(workers=2)) as ports:
        plan = plan_local(["python", "train.py"], workers=2, ports=ports, env=os.environ)
        result = run_plan(plan)

A plan is made by a pure function and says everything: one command, one TF_CONFIG and one log file
for each task. Running it is another matter, and lives in another module. Nothing here imports
TensorFlow.

`tfd.launch` is the function of `functions`, so write `from tfdist_ext.launch import run_plan`.
Names are looked up when they are first used, because `import tfdist_ext` imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.launch.functions import launch
    from tfdist_ext.launch.plan import (
        LaunchPlan,
        TaskPlan,
        addresses_needed,
        plan_local,
        shell_line,
    )
    from tfdist_ext.launch.ports import reserve_ports
    from tfdist_ext.launch.run import Limits, RunResult, run_plan

_HOME = {
    "LaunchPlan": "plan",
    "Limits": "run",
    "RunResult": "run",
    "TaskPlan": "plan",
    "addresses_needed": "plan",
    "launch": "functions",
    "plan_local": "plan",
    "reserve_ports": "ports",
    "run_plan": "run",
    "shell_line": "plan",
}

__all__ = [
    "LaunchPlan",
    "Limits",
    "RunResult",
    "TaskPlan",
    "addresses_needed",
    "launch",
    "plan_local",
    "reserve_ports",
    "run_plan",
    "shell_line",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
