"""A thin layer over tf.distribute: one Keras script, trained on one device or on a cluster.

    import keras
    import tfdist_ext as tfd

    strategy = tfd.create_strategy()          # TF_CONFIG, Slurm, Kubernetes, a TPU, local devices
    model = tfd.distribute(build, strategy)   # a function that returns a Keras model, or a model
    model.fit(x, y, batch_size=64, epochs=3)  # the batch size is that of the global batch

Names are looked up when they are first used, so that what needs no TensorFlow (the cluster
description, the launcher) does not wait for its start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Python binds the name of a package below this one when it is first imported. This import does that
# now, so that `launch` stays the function.
from tfdist_ext.launch.functions import launch

if TYPE_CHECKING:
    from tfdist_ext import data, flags, placement, ray, strategies
    from tfdist_ext.cluster import ClusterConfig, Task
    from tfdist_ext.errors import (
        ClusterConfigError,
        DataError,
        LaunchError,
        PeerError,
        PlacementError,
        StrategyError,
        TaskError,
        TfDistError,
        TrainingError,
    )
    from tfdist_ext.placement import PlacementPlan
    from tfdist_ext.placement.live.learning import plan_placement
    from tfdist_ext.strategies import (
        available_strategies,
        create_strategy,
        explain,
        register_strategy,
        run,
    )
    from tfdist_ext.training import (
        DistributedModel,
        WorkerTensorBoard,
        all_rows,
        distribute,
        finished_checkpoints,
        training_is_done,
    )

__version__ = "0.1.0"

_HOME = {
    "ClusterConfig": "tfdist_ext.cluster",
    "ClusterConfigError": "tfdist_ext.errors",
    "DataError": "tfdist_ext.errors",
    "DistributedModel": "tfdist_ext.training",
    "LaunchError": "tfdist_ext.errors",
    "PeerError": "tfdist_ext.errors",
    "PlacementError": "tfdist_ext.errors",
    "PlacementPlan": "tfdist_ext.placement",
    "StrategyError": "tfdist_ext.errors",
    "Task": "tfdist_ext.cluster",
    "TaskError": "tfdist_ext.errors",
    "TfDistError": "tfdist_ext.errors",
    "TrainingError": "tfdist_ext.errors",
    "WorkerTensorBoard": "tfdist_ext.training",
    "all_rows": "tfdist_ext.training",
    "available_strategies": "tfdist_ext.strategies",
    "create_strategy": "tfdist_ext.strategies",
    "distribute": "tfdist_ext.training",
    "explain": "tfdist_ext.strategies",
    "finished_checkpoints": "tfdist_ext.training",
    "plan_placement": "tfdist_ext.placement.live.learning",
    "register_strategy": "tfdist_ext.strategies",
    "run": "tfdist_ext.strategies",
    "training_is_done": "tfdist_ext.training",
}
_ROOMS = ("data", "flags", "placement", "ray", "strategies")

__all__ = [  # `launch`, and the names of _HOME and _ROOMS; a test compares them
    "ClusterConfig",
    "ClusterConfigError",
    "DataError",
    "DistributedModel",
    "LaunchError",
    "PeerError",
    "PlacementError",
    "PlacementPlan",
    "StrategyError",
    "Task",
    "TaskError",
    "TfDistError",
    "TrainingError",
    "WorkerTensorBoard",
    "all_rows",
    "available_strategies",
    "create_strategy",
    "data",
    "distribute",
    "explain",
    "finished_checkpoints",
    "flags",
    "launch",
    "placement",
    "plan_placement",
    "ray",
    "register_strategy",
    "run",
    "strategies",
    "training_is_done",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in _ROOMS:
        value = import_module(f"tfdist_ext.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
