"""docs/examples/multi_worker.py on two real workers."""

from __future__ import annotations

from typing import Any

import pytest


def check(found: dict[str, Any], chiefs: Any, one_device: dict[str, Any], strategy: Any) -> None:
    """The chief's initial values; one device's weights and losses; the same on both workers."""
    import numpy as np

    from tfdist_ext.testing import assert_same_on_all_replicas

    for here, there in zip(found["began"], chiefs, strict=True):
        np.testing.assert_array_equal(here, there)
    for here, there in zip(found["weights"], one_device["weights"], strict=True):
        np.testing.assert_allclose(here, there, atol=1e-6)
    np.testing.assert_allclose(found["losses"], one_device["losses"], rtol=1e-5)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert_same_on_all_replicas(found["weights"], strategy=strategy)


def train_on_one_device(example: Any, weights: Any) -> dict[str, Any]:
    """Keras's own fit, from these weights."""
    model = example.build()
    model.set_weights(weights)
    x, y = example.data()
    batches = {"batch_size": example.GLOBAL_BATCH, "epochs": example.EPOCHS, "shuffle": False}
    history = model.fit(x, y, **batches, verbose=0).history
    return {"weights": model.get_weights(), "losses": history["loss"]}


@pytest.mark.tfdist_cluster(worker=2)
def test_both_loops_do_as_one_device(
    tfdist_cluster: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import keras
    import multi_worker as example

    seed, index = keras.utils.set_random_seed, tfdist_cluster.task.index
    monkeypatch.setattr(keras.utils, "set_random_seed", lambda _: seed(index))  # not that of others
    results = example.main()
    lines = capsys.readouterr().out.splitlines()
    assert "2 in sync" in lines[3]
    names, losses = zip(*(line.split(": ") for line in lines[-2:]), strict=True)
    assert names == ("plain", "with_tfdist_ext")
    assert losses[0] == losses[1]

    strategy = example.plain_strategy()
    assert strategy.num_replicas_in_sync == 2
    seed(0)
    chiefs = example.build().get_weights()
    one_device = train_on_one_device(example, chiefs)
    for found in results:
        check(found, chiefs, one_device, strategy)
