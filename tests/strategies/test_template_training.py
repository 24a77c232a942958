"""Keras on the template and on strategies that change its hooks, from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from template_cases import Mixed, Owned, ReadAsMean, build, train

import tfdist_ext as tfd
from tfdist_ext.strategies import StrategyTemplate


def test_where_keras_s_variables_are() -> None:
    strategy = Mixed(3)
    model = tfd.distribute(build, strategy).keras_model
    assert {len(strategy.copies(v.value)) for v in model.trainable_weights} == {1, 3}


def test_slots_lie_beside_their_variables() -> None:
    strategy = Owned(3)
    model = tfd.distribute(build, strategy).keras_model
    kernel = model.layers[-1].kernel
    index = [v.path for v in model.trainable_variables].index(kernel.path)
    assert len(strategy.copies(kernel.value)) == 3
    for slots in (model.optimizer._momentums, model.optimizer._velocities):
        (slot,) = strategy.copies(slots[index].value)
        assert slot.device.endswith("CPU:1")


def test_updates_go_through_the_hook() -> None:
    updated: list[int] = []

    class Noting(Owned):
        def update_variable(self, variable: Any, copies: Any, update: Any) -> Any:
            updated.append(id(variable))
            return super().update_variable(variable, copies, update)

    model = tfd.distribute(lambda: build("SGD"), Noting(2))
    updated.clear()
    train(model, epochs=1, tested=False)
    inner = model.keras_model
    slots = inner.optimizer.variables[2:]  # on the owner alone, where the optimizer writes them
    written = [*inner.variables, *inner.optimizer.variables[:2], *inner.metrics_variables]
    assert all(len(model.strategy.copies(slot.value)) == 1 for slot in slots)
    assert [v.path for v in written if id(v.value) not in updated] == []
    # Set to zero first, and to what replicas counted in the end.
    assert [updated.count(id(v.value)) for v in inner.metrics_variables] == [2, 2, 2, 2]


def test_a_checkpoint_holds_what_is_read(tmp_path: Path) -> None:
    model = tfd.distribute(build, ReadAsMean(2))
    bias = model.keras_model.layers[-1].bias
    for copy, value in zip(model.strategy.copies(bias.value), (1.0, 3.0), strict=True):
        copy.assign([value])
    model.save_checkpoint(str(tmp_path / "checkpoint"))
    other = tfd.distribute(build, StrategyTemplate(2))
    other.restore_checkpoint(str(tmp_path / "checkpoint"))
    assert other.keras_model.layers[-1].bias.numpy().tolist() == [2]
