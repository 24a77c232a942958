"""Tests of a project that has installed tfdist_ext and its pytest plugin."""

import pytest
import ratings
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.testing import assert_same_on_all_replicas, assert_trains_like_one_device


def test_the_same_numbers_on_every_strategy(tfdist_strategy):
    assert_trains_like_one_device(ratings.build, ratings.data(), tfdist_strategy, batch_size=12)


@pytest.mark.tfdist_cluster(worker=2)
def test_workers_agree(tfdist_cluster):
    strategy = tfd.create_strategy()
    model = tfd.distribute(ratings.build, strategy)
    model.fit(*ratings.data(), batch_size=8, epochs=2, verbose=0)
    assert_same_on_all_replicas(model.weights, strategy=strategy)
    addresses = tfdist_cluster.config.jobs["worker"]
    assert addresses[tfdist_cluster.task.index].startswith("127.0.0.1:")


@pytest.mark.tfdist_logical_cpus(3)
def test_three_devices():
    strategy = tfd.create_strategy("mirrored")
    assert strategy.num_replicas_in_sync == len(tf.config.list_logical_devices("CPU")) == 3
