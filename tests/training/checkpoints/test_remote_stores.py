"""Checkpoints in a store that only TensorFlow opens: ram:// stands for gs:// and the others."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import tensorflow as tf
from checkpoint_cases import FailsIn, train
from training_cases import assert_same_weights

import tfdist_ext as tfd

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def remote() -> str:
    return f"ram://bucket-{uuid.uuid4().hex}/run"


def test_a_training_goes_on_as_if_it_had_never_ended(tmp_path: Path, remote: str) -> None:
    expected = train(tmp_path / "local", epochs=5)
    options = {"epochs": 5, "checkpoint_every": 2}
    with pytest.raises(RuntimeError, match="in a callback"):
        train(remote, FailsIn(3), **options)
    before = tfd.finished_checkpoints(remote)
    assert before[-1] == f"{remote}/epoch-00003.safetensors"
    resumed = train(remote, **options)
    assert resumed.history.epoch == [0, 1, 2, 3, 4]
    assert_same_weights(resumed, expected)
    assert tfd.training_is_done(remote)
    names = sorted(tf.io.gfile.listdir(remote))
    assert [name.partition("-")[0] for name in names] == ["epoch"] * 3 + ["owner.json"]


def test_a_store_that_tensorflow_does_not_know_is_an_error_at_the_start() -> None:
    words = r"s3://bucket/run/owner\.json cannot be written: .*'s3' not implemented"
    with pytest.raises(tfd.TrainingError, match=words):
        train("s3://bucket/run")
