"""The private names of TensorFlow that training uses, each with the reason."""

from __future__ import annotations

from typing import Any

from tensorflow.python.eager import tape

__all__ = ["read_by_tapes"]


def read_by_tapes(stand_in: Any) -> None:
    """Let open gradient tapes watch the `handle` of what stands in for a trainable variable.

    Private because only a tf.Variable is watched without the user's word.
    """
    tape.variable_accessed(stand_in)
