"""A thin layer over tf.distribute: one Keras script, trained on one device or on a cluster.

    import keras
    import tfdist_ext as tfd

    strategy = tfd.create_strategy()          # TF_CONFIG, Slurm, Kubernetes, a TPU, local devices
    model = tfd.distribute(build, strategy)   # a function that returns a Keras model, or a model
    model.fit(x, y, batch_size=64, epochs=3)  # 64 is the size of the global batch

Names are looked up when they are first used. So the cluster description and the launcher, which
need no TensorFlow, do not wait for its import.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext import data as data
    from tfdist_ext import flags as flags
    from tfdist_ext import placement as placement
    from tfdist_ext import ray as ray
    from tfdist_ext import strategies as strategies
    from tfdist_ext.cluster import ClusterConfig as ClusterConfig
    from tfdist_ext.cluster import Task as Task
    from tfdist_ext.errors import ClusterConfigError as ClusterConfigError
    from tfdist_ext.errors import DataError as DataError
    from tfdist_ext.errors import LaunchError as LaunchError
    from tfdist_ext.errors import PeerError as PeerError
    from tfdist_ext.errors import PlacementError as PlacementError
    from tfdist_ext.errors import StrategyError as StrategyError
    from tfdist_ext.errors import TaskError as TaskError
    from tfdist_ext.errors import TfDistError as TfDistError
    from tfdist_ext.errors import TrainingError as TrainingError
    from tfdist_ext.launcher.functions import launch as launch
    from tfdist_ext.placement import PlacementPlan as PlacementPlan
    from tfdist_ext.placement.live.learning import plan_placement as plan_placement
    from tfdist_ext.placement.scaling import WorkersPlan as WorkersPlan
    from tfdist_ext.step_costs import plan_workers as plan_workers
    from tfdist_ext.strategies import available_strategies as available_strategies
    from tfdist_ext.strategies import create_strategy as create_strategy
    from tfdist_ext.strategies import explain as explain
    from tfdist_ext.strategies import register_strategy as register_strategy
    from tfdist_ext.strategies import run as run
    from tfdist_ext.training import DistributedModel as DistributedModel
    from tfdist_ext.training import WorkerTensorBoard as WorkerTensorBoard
    from tfdist_ext.training import all_rows as all_rows
    from tfdist_ext.training import distribute as distribute
    from tfdist_ext.training import finished_checkpoints as finished_checkpoints
    from tfdist_ext.training import training_is_done as training_is_done
    from tfdist_ext.training.verify import Verification as Verification
    from tfdist_ext.training.verify import verify as verify

if "TFDIST_ERROR_FILE" in os.environ:  # this process is a task of a launcher
    from tfdist_ext import failures

    failures.watch()

__version__ = "0.1.0"

_HOME = {
    name: f"tfdist_ext.{module}"
    for module, names in {
        "cluster": "ClusterConfig Task",
        "errors": "ClusterConfigError DataError LaunchError PeerError PlacementError StrategyError"
        " TaskError TfDistError TrainingError",
        "launcher.functions": "launch",
        "placement": "PlacementPlan",
        "placement.live.learning": "plan_placement",
        "placement.scaling": "WorkersPlan",
        "step_costs": "plan_workers",
        "strategies": "available_strategies create_strategy explain register_strategy run",
        "training": "DistributedModel WorkerTensorBoard all_rows distribute finished_checkpoints"
        " training_is_done",
        "training.verify": "Verification verify",
    }.items()
    for name in names.split()
}
_ROOMS = ("data", "flags", "placement", "ray", "strategies")

__all__ = [*_HOME, *_ROOMS]


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
