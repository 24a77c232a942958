"""TFRecord files as TensorFlow writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True, scope="session")
def as_many_cpus_as_elsewhere(four_cpus: None) -> None:
    """Whichever of these modules a process runs first, others may want several CPUs."""


@pytest.fixture
def write_records() -> Callable[[str | Path, Sequence[bytes]], str]:
    def write(path: str | Path, payloads: Sequence[bytes]) -> str:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for payload in payloads:
                writer.write(payload)
        return str(path)

    return write
