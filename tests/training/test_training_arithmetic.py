"""The pure parts: shards, epochs, pace, and which callbacks look at batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import strategy_of

import tfdist_ext as tfd
from tfdist_ext.data.shards import bounds
from tfdist_ext.training.callbacks.in_cluster import callbacks_of_this_task, uses_batch_hooks
from tfdist_ext.training.epochs import steps_of_epoch
from tfdist_ext.training.inputs import _traced_dataset_fn
from tfdist_ext.training.programs import StepsPerExecutionTuner
from tfdist_ext.training.steps.scope import ReplicaScope
from tfdist_ext.training.synchronous.program import SynchronousProgram
from tfdist_ext.training.synchronous.reduction import StackedStates


@pytest.mark.parametrize(
    ("n", "count", "shards"),
    [
        pytest.param(8, 2, [(0, 4), (4, 8)], id="even"),
        pytest.param(7, 2, [(0, 3), (3, 7)], id="one row more for the last"),
        pytest.param(2, 4, [(0, 0), (0, 1), (1, 1), (1, 2)], id="fewer rows than shards"),
        pytest.param(0, 2, [(0, 0), (0, 0)], id="nothing to share"),
        pytest.param(5, 1, [(0, 5)], id="a single shard has all"),
    ],
)
def test_shards(n: int, count: int, shards: list[tuple[int, int]]) -> None:
    assert [bounds(n, i, count) for i in range(count)] == shards
    tensors = [bounds(tf.constant(n, tf.int64), i, count) for i in range(count)]
    assert [(int(low), int(high)) for low, high in tensors] == shards


@given(st.integers(0, 10**12), st.integers(1, 300))
def test_shards_are_disjoint_complete_and_even(n: int, count: int) -> None:
    shards = [bounds(n, i, count) for i in range(count)]
    assert shards[0][0] == 0
    assert shards[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(shards))
    sizes = [high - low for low, high in shards]
    assert max(sizes) - min(sizes) <= 1


def epochs_of_keras(in_pass: int, asked: int | None, epochs: int) -> list[list[int]]:
    """Keras's EpochIterator as a list: the numbers of the batches that each epoch reads."""
    result, position = [], 0
    for _ in range(epochs):
        if asked is None:
            position = 0
        read = []
        for _ in range(asked or in_pass):
            if position >= in_pass:
                break
            read.append(position)
            position += 1
        if position >= in_pass:
            position = 0
        result.append(read)
    return result


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 9))
@settings(max_examples=300)
def test_epochs_read_the_batches_that_keras_reads(
    in_pass: int, asked: int | None, epochs: int
) -> None:
    position, read = 0, []
    for _ in range(epochs):
        steps, after = steps_of_epoch(position, in_pass, asked)
        read.append(list(range(position, position + steps)))
        position = after
    assert read == epochs_of_keras(in_pass, asked, epochs)


class TestPace:
    def test_fixed(self) -> None:
        pace = StepsPerExecutionTuner(fixed=4)
        assert [pace.next(n) for n in (10, 6, 2, None)] == [4, 4, 2, 4]

    def test_grows_from_one_by_a_factor(self) -> None:
        pace = StepsPerExecutionTuner()
        assert [pace.next(None) for _ in range(4)] == [1, 4, 16, 64]

    def test_aims_at_the_target(self) -> None:
        pace, steps, before = StepsPerExecutionTuner(target=0.4), [], 0.0
        for _ in range(8):
            steps.append(pace.next(None))
            pace.record(before)
            # The first time is the compiler's. Ten milliseconds a step, so forty fit.
            before = 0.01 * steps[-1] if len(steps) > 1 else 2.0
        assert steps == [1, 4, 1, 16, 64, 40, 40, 40]

    def test_slow_steps_go_one_by_one(self) -> None:
        pace, steps, before = StepsPerExecutionTuner(target=0.4), [], 0.0
        for _ in range(6):
            steps.append(pace.next(None))
            pace.record(before)
            before = 2.0 * steps[-1]
        assert steps == [1, 4, 1, 1, 1, 1]

    def test_a_short_rest_of_an_epoch_does_not_slow_the_next(self) -> None:
        pace, steps, before = StepsPerExecutionTuner(target=0.4), [], 0.0
        for left in (500, 500, 500, 500, 500, 500, 3, 500, 500, 500):
            steps.append(pace.next(left))
            pace.record(before)
            before = 0.002 * steps[-1]
        assert steps[5:] == [200, 3, 200, 200, 200]

    def test_a_second_fit_begins_where_the_first_has_ended(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        run = SynchronousProgram.run

        def noted(self: Any, data: Any, n: int, seconds: float, **others: Any) -> Any:
            asked.append(n)
            return run(self, data, n, seconds, **others)

        monkeypatch.setattr(SynchronousProgram, "run", noted)
        x, y = np.ones((85 * 7, 3), "float32"), np.ones((85 * 7, 1), "float32")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model = tfd.distribute(model, strategy_of("mirrored", 2))
        _traced_dataset_fn.cache_clear()
        model.fit(x, y, batch_size=7, verbose=0)
        assert asked[:2] == [1, 4]
        asked.clear()
        model.fit(x, y, batch_size=7, verbose=0)
        assert asked[0] > 4
        asked.clear()
        model.fit(x[:70], y[:70], batch_size=35, verbose=0)  # of another size nothing is known
        assert asked[0] == 1
        assert _traced_dataset_fn.cache_info().hits == 1

    @given(st.lists(st.floats(0, 5), max_size=30), st.integers(1, 500))
    def test_runs_exactly_the_steps_there_are(self, times: list[float], total: int) -> None:
        pace, left = StepsPerExecutionTuner(), total
        for seconds in [*times, *([0.0] * total)]:
            if left == 0:
                break
            steps = pace.next(left)
            assert 1 <= steps <= left
            left -= steps
            pace.record(seconds)
        assert left == 0


class Each(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class OldName(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


class EachTest(keras.callbacks.Callback):
    def on_test_batch_begin(self, batch, logs=None):
        pass


K = keras.callbacks


@pytest.mark.parametrize(
    ("callback", "kinds"),
    [
        pytest.param(Each(), {"train"}, id="own"),
        pytest.param(OldName(), {"train"}, id="own, by the old name"),
        pytest.param(EachTest(), {"test"}, id="own, of evaluation"),
        pytest.param(K.LambdaCallback(on_train_batch_end=print), {"train"}, id="lambda on batches"),
        pytest.param(K.LambdaCallback(on_epoch_end=print), set(), id="lambda on epochs"),
        pytest.param(K.TerminateOnNaN(), {"train"}, id="looks for NaN"),
        pytest.param(K.History(), set(), id="history"),
        pytest.param(K.ProgbarLogger(), set(), id="progress"),
        pytest.param(K.EarlyStopping(), set(), id="early stopping"),
        pytest.param(K.CSVLogger("x"), set(), id="csv"),
        pytest.param(K.ModelCheckpoint("x.keras"), set(), id="checkpoint of epochs"),
        pytest.param(K.ModelCheckpoint("x.keras", save_freq=5), {"train"}, id="of batches"),
        pytest.param(K.BackupAndRestore("x"), set(), id="backup of epochs"),
        pytest.param(K.BackupAndRestore("x", save_freq=5), {"train"}, id="backup of batches"),
        pytest.param(K.TensorBoard("x"), set(), id="board of epochs"),
        pytest.param(K.TensorBoard("x", update_freq="batch"), {"train", "test"}, id="of batches"),
        pytest.param(K.TensorBoard("x", profile_batch=2), {"train", "test"}, id="profiling"),
    ],
)
def test_who_looks_at_batches(callback: keras.callbacks.Callback, kinds: set[str]) -> None:
    assert {kind for kind in ("train", "test") if uses_batch_hooks([callback], kind)} == kinds


def test_only_the_chief_writes_and_prints() -> None:
    writers = [K.CSVLogger("x"), K.ModelCheckpoint("x.keras"), K.BackupAndRestore("x")]
    writers += [K.TensorBoard("x"), K.ProgbarLogger(), K.RemoteMonitor()]
    deciding = [K.EarlyStopping(verbose=1), K.ReduceLROnPlateau(verbose=1), Each()]
    assert callbacks_of_this_task([writers, deciding], is_chief=True) == writers + deciding
    assert callbacks_of_this_task(None, is_chief=True) == []
    assert callbacks_of_this_task(deciding[0], is_chief=True) == deciding[:1]
    assert deciding[0].verbose == 1
    assert callbacks_of_this_task(writers + deciding, is_chief=False) == deciding
    assert [callback.verbose for callback in deciding[:2]] == [0, 0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (3,), (1,), (2, 2), (5000,)]),
            st.sampled_from(["float32", "int32", "bool"]),
            st.sampled_from(["sum", "mean"]),
        ),
        max_size=8,
    )
)
@settings(deadline=None)
def test_states_of_metrics_are_stacked_and_come_back(kinds: list[tuple[Any, str, str]]) -> None:
    values = [np.full(shape, i % 2).astype(dtype) for i, (shape, dtype, _) in enumerate(kinds)]
    variables = [
        keras.Variable(value, dtype=value.dtype.name, aggregation=aggregation)
        for value, (*_, aggregation) in zip(values, kinds, strict=True)
    ]
    stacked = StackedStates(variables)
    few = stacked.stack([tf.constant(value) for value in values])
    large = sum(shape == (5000,) for shape, *_ in kinds)  # copying one takes longer than sending it
    assert len(few) == len({kind for kind in kinds if kind[0] != (5000,)}) + large
    for back, value in zip(stacked.unstack(few), values, strict=True):
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(back, value)


class _HasRows:
    """What `StackedStates` asks of a step's context, for a replica with rows or without."""

    def __init__(self, rows: tf.Tensor):
        self.rows = rows

    def where_nonempty(self, value: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
        return tf.where(self.rows > 0, value, otherwise)


@pytest.mark.parametrize(
    ("last", "expected", "additions"),
    [
        pytest.param(lambda state: state + 5.0, 7.0, 1, id="added to"),
        pytest.param(lambda state: 5.0 + state, 7.0, 3, id="added to something"),
        pytest.param(lambda state: state * 5.0, 10.0, 2, id="multiplied"),
        pytest.param(lambda state: state + state, 4.0, 1, id="added to itself"),
        pytest.param(lambda state: state, 2.0, 2, id="left alone"),
    ],
)
def test_states_to_which_a_step_adds_take_one_addition(
    last: Any, expected: float, additions: int
) -> None:
    variables = [keras.Variable(value, aggregation="sum") for value in (0.0, 1.0, 2.0)]
    stacked = StackedStates(variables)

    @tf.function(input_signature=[tf.TensorSpec([3]), tf.TensorSpec([], tf.int32)], autograph=False)
    def step(begun: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        with ReplicaScope(zip(variables, stacked.unstack([begun]), strict=True)) as scope:
            variables[0].assign_add(3.0)
            variables[1].assign_add(4.0)
            variables[2].assign(last(variables[2].value))
        (after,) = stacked.after_step(scope, _HasRows(rows), [begun])
        return after

    begun = tf.constant([0.0, 1.0, 2.0])
    np.testing.assert_array_equal(step(begun, 1), [3.0, 5.0, expected])
    np.testing.assert_array_equal(step(begun, 0), begun)
    used = {output.op for output in step.get_concrete_function().graph.outputs}
    while new := {tensor.op for operation in used for tensor in operation.inputs} - used:
        used |= new
    assert sum(operation.type == "AddV2" for operation in used) == additions
