"""Pipelines that tf.data does not tune while they run."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["untuned"]


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set without tf.data's tuner, for pipelines where there is nothing to choose.

    The tuner sleeps for twice as long each time, up to a minute, and now and then misses that its
    iterator has come to an end; then whoever lets go of the iterator waits until it wakes up
    (docs/tensorflow_facts.md). AUTOTUNE stands for the number of cores here, at most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
