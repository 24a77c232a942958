"""What is chosen, as a table: a name and an environment -> a strategy and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import tfdist_ext as tfd
from tfdist_ext.strategies.choice import Environment, choose
from tfdist_ext.strategies.resolvers import Described

CPU, TWO_CPUS = ["CPU:0"], ["CPU:0", "CPU:1"]
GPU, TWO_GPUS = [*TWO_CPUS, "GPU:0"], [*CPU, "GPU:0", "GPU:1"]
TPU = "the environment names the TPU 't'"


def _cluster(task: str, *jobs: str) -> Described:
    return Described({job: (f"{job}:1",) for job in jobs}, tfd.Task(task, 0), "TF_CONFIG")


WORKERS = _cluster("worker", "worker")
SERVERS = _cluster("chief", "chief", "worker", "ps")
EVALUATOR = _cluster("evaluator", "chief", "worker", "ps", "evaluator")


@pytest.mark.parametrize(
    ("name", "known", "chosen", "because"),
    [
        ("auto", {"cluster": WORKERS}, "multi_worker_mirrored", "TF_CONFIG describes a cluster"),
        ("auto", {"cluster": SERVERS}, "parameter_server", "TF_CONFIG has ps tasks (chief, worker"),
        ("auto", {"cluster": WORKERS, "tpu": TPU}, "multi_worker_mirrored", "TF_CONFIG"),
        ("auto", {"tpu": TPU}, "tpu", "names the TPU 't'"),
        ("auto", {"tpu": TPU, "asked_for": 2}, "mirrored", "devices= asks for 2"),
        ("auto", {"asked_for": 1}, "one_device", "devices= asks for 1"),
        ("auto", {"devices": TWO_GPUS}, "mirrored", "2 GPUs on this machine"),
        ("auto", {"devices": GPU}, "one_device", "one GPU on this machine"),
        ("auto", {}, "mirrored", "2 logical CPUs on this machine, no cluster"),
        ("auto", {"devices": CPU}, "default", "one CPU on this machine"),
        ("parameter_server", {"cluster": EVALUATOR}, "mirrored", "evaluator:0 works by itself"),
        ("multi_worker_mirrored", {"cluster": EVALUATOR, "tpu": TPU}, "tpu", "names the TPU"),
        ("placed", {"cluster": EVALUATOR}, "placed", "by name in the call"),
    ],
)
def test_the_most_specific_signal_wins(
    name: str, known: dict[str, Any], chosen: str, because: str
) -> None:
    devices = known.pop("devices", None)

    def listed() -> Sequence[str]:
        # Listing devices starts TensorFlow, which a strategy for a cluster or a TPU forbids.
        assert not {"asked_for", "tpu"} & known.keys()
        assert chosen not in ("multi_worker_mirrored", "parameter_server")
        return devices or TWO_CPUS

    choice = choose(name, "the call", Environment(listed, **known))
    assert choice.name == chosen
    assert because in choice.because
    assert not any(line.startswith(f"{chosen}:") for line in choice.passed_over)
