"""The kit catches each fault that is planted in a strategy, and says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from check_results import run_checks

import tfdist_ext as tfd
from tfdist_ext.strategies import StrategyTemplate
from tfdist_ext.testing import StrategyConformance


class FirstValue(StrategyTemplate):
    """A reduction returns the first replica's value."""

    def reduce_values(self, op: Any, values: Any, devices: Any, what: Any = None) -> Any:
        return [values[0]] * len(devices)


class OneUpdated(StrategyTemplate):
    """An update is applied on one replica only."""

    def update_variable(self, variable: Any, copies: Any, update: Any) -> Any:
        return [update(0)] * len(copies)


class LargeOnesMissed(StrategyTemplate):
    """Copies of a large variable begin different."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        made = super().create_variable(spec, create, beside)
        if spec.bytes > 1_000_000:
            self.copies(made)[-1].assign(tf.zeros(spec.shape))
        return made


class WholeDataset(StrategyTemplate):
    """Each replica gets the whole dataset."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        each = tf.distribute.InputReplicationMode.PER_REPLICA
        options = tf.distribute.InputOptions(
            experimental_fetch_to_device=False, experimental_replication_mode=each
        )
        return self.distribute_datasets_from_function(lambda context: dataset, options)


class NotSaved(StrategyTemplate):
    """A variable of a matrix is not saved."""

    def create_variable(self, spec: Any, create: Any, beside: Any = None) -> Any:
        made = super().create_variable(spec, create, beside)
        if len(spec.shape) == 2:
            made._gather_saveables_for_checkpoint = dict
        return made


def failures(strategy: type[StrategyTemplate], checks: list[str]) -> dict[str, str]:
    """Name of each check that fails -> what it says."""

    class Planted(StrategyConformance):
        def strategy(self) -> tf.distribute.Strategy:
            return strategy(3)

    return {o.check: o.reason for o in run_checks(Planted, checks) if o.failed}


@pytest.mark.parametrize(
    ("planted", "checks", "message"),
    [
        (
            FirstValue,
            ["all_reduce", "reduce", "assignments_in_replicas"],
            "all_reduce of mean, eager: must be [2.0, 2.0, 2.0], got [1.0, 1.0, 1.0].",
        ),
        (
            OneUpdated,
            ["assignments_in_replicas", "update", "update_in_replicas"],
            "update, read in replicas: must be [23.0, 23.0, 23.0], got [23.0, 1.0, 1.0].",
        ),
        (
            LargeOnesMissed,
            ["equal_initial_values", "update"],
            "update of 1 MiB, read in replicas: must be [[7.0, 7.0], [7.0, 7.0], [7.0, 7.0]], got"
            " [[7.0, 7.0], [7.0, 7.0], [6.0, 6.0]].",
        ),
        (
            WholeDataset,
            ["distribute_dataset"],
            "rows of each batch: must be [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], got [[0, 1, 2,",
        ),
        (
            NotSaved,
            ["checkpoint", "deferred_restore"],
            "values in the checkpoint: must be [[[1.0, 2.0], [3.0, 4.0]], 6.0, 6.0], got [[[0.0,",
        ),
        (
            FirstValue,
            ["trains_like_one_device"],
            "compared values differ, the most in ",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_fault_is_found(planted: Any, checks: list[str], message: str) -> None:
    names = [f"test_{name}" for name in checks]
    failed = failures(planted, names)
    assert list(failed) == names
    assert any(message in reason for reason in failed.values()), failed


def test_factory_without_a_strategy_fails_with_a_message() -> None:
    class Empty(StrategyConformance):
        pass

    with pytest.raises(NotImplementedError, match="Empty has no method `strategy`"):
        Empty().test_scope()

    class Wrong(StrategyConformance):
        def strategy(self) -> Any:
            return "mirrored"

    with pytest.raises(
        tfd.StrategyError, match=r"Wrong\.strategy returned .* not a tf\.distribute"
    ):
        Wrong().test_scope()


def test_too_few_cpus_are_an_error() -> None:
    class Tests(StrategyConformance):
        def strategy(self) -> tf.distribute.Strategy:
            return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(6)])

    message = r"all tfdist_ext\.testing\.logical_cpus\(6\) first\."
    with pytest.raises(tfd.StrategyError, match=message):
        Tests().test_scope()
