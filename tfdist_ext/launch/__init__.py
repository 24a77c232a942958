"""Start a cluster on this machine, watch it, and end it: what `tfdist run` does.

    with reserve_ports(addresses_needed(workers=2)) as ports:
        plan = plan_local(["python", "train.py"], workers=2, ports=ports, env=os.environ)
        result = run_plan(plan)

A plan is made by a pure function and says everything: one command, one TF_CONFIG and one log file
a task. Running it is another matter, and lives in another module. Nothing here imports TensorFlow.

The package is a function, too: `tfd.launch(fn)` runs a function in the tasks of a cluster. Python
binds a package's name to the package, whatever is imported first, so that both are one object.
"""

import inspect
import sys
from types import ModuleType

from tfdist_ext.launch.functions import launch
from tfdist_ext.launch.plan import (
    LaunchPlan,
    TaskPlan,
    addresses_needed,
    plan_local,
    shell_line,
)
from tfdist_ext.launch.ports import reserve_ports
from tfdist_ext.launch.run import RunResult, run_plan

__all__ = [
    "LaunchPlan",
    "RunResult",
    "TaskPlan",
    "addresses_needed",
    "launch",
    "plan_local",
    "reserve_ports",
    "run_plan",
    "shell_line",
]


class _CallablePackage(ModuleType):
    __call__ = staticmethod(launch)
    __signature__ = inspect.signature(launch)  # `tfd.launch?` of a notebook shows it


sys.modules[__name__].__class__ = _CallablePackage
