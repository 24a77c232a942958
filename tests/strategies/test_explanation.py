"""Why this strategy, in words."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist_ext as tfd


def test_explain_lists_the_choice_and_what_was_passed_over() -> None:
    assert str(tfd.explain(tfd.create_strategy())) == (
        "strategy     mirrored (MirroredStrategy)\n"
        "because      4 logical CPUs on this machine, no cluster\n"
        "task         a single process\n"
        "replicas     4 in sync\n"
        "devices      CPU:0, CPU:1, CPU:2, CPU:3\n"
        "passed over  multi_worker_mirrored, parameter_server: no cluster\n"
        "             tpu: no TPU is named\n"
        "             mirrored on GPUs: there are none\n"
        "             TF_CONFIG: TF_CONFIG is not set\n"
        "             Open MPI: OMPI_COMM_WORLD_RANK is not set\n"
        "             Slurm: SLURM_PROCID is not set\n"
        "             SageMaker: SM_HOSTS is not set\n"
        "             Kubernetes: JOB_COMPLETION_INDEX is not set"
    )


def test_an_explanation_has_attributes_that_cannot_be_set() -> None:
    explanation = tfd.explain(tfd.create_strategy(devices=["CPU:3", "/device:CPU:1"]))
    assert explanation.strategy == "mirrored"
    assert explanation.reason == "devices= asks for 2 on this machine, no cluster"
    assert explanation.replicas == 2
    assert explanation.devices == ("CPU:3", "CPU:1")  # in the order that was given
    assert "multi_worker_mirrored, parameter_server: no cluster" in explanation.considered
    with pytest.raises(AttributeError):
        explanation.replicas = 3  # type: ignore[misc]


def test_central_storage_says_where_variables_are() -> None:
    strategy = tfd.create_strategy("central_storage", devices=2, parameter_device="CPU:3")
    assert (
        "devices      CPU:0, CPU:1, variables on CPU:3" in str(tfd.explain(strategy)).splitlines()
    )


def test_a_strategy_of_tensorflow_was_made_elsewhere() -> None:
    text = str(tfd.explain(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])))
    for words in ("made elsewhere", "not made by create_strategy", "2 in sync", "CPU:0, CPU:1"):
        assert words in text
    text = str(tfd.explain(tf.distribute.get_strategy()))
    for words in ("replicas     1", "wherever TensorFlow places"):
        assert words in text
