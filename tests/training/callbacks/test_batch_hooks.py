"""Which callbacks look at batches, and which run on which task."""

from __future__ import annotations

import keras
import pytest

from tfdist_ext.training.callbacks.in_cluster import callbacks_of_this_task, uses_batch_hooks


class Each(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class EachTest(keras.callbacks.Callback):
    def on_test_batch_begin(self, batch, logs=None):
        pass


K = keras.callbacks


@pytest.mark.parametrize(
    ("callback", "kinds"),
    [
        pytest.param(Each(), {"train"}, id="own"),
        pytest.param(EachTest(), {"test"}, id="own, of evaluation"),
        pytest.param(K.LambdaCallback(on_train_batch_end=print), {"train"}, id="lambda on batches"),
        pytest.param(K.TerminateOnNaN(), {"train"}, id="looks for NaN"),
        pytest.param(K.History(), set(), id="history"),
        pytest.param(K.ModelCheckpoint("x.keras"), set(), id="checkpoint of epochs"),
        pytest.param(K.ModelCheckpoint("x.keras", save_freq=5), {"train"}, id="of batches"),
        pytest.param(K.BackupAndRestore("x", save_freq=5), {"train"}, id="backup of batches"),
        pytest.param(K.TensorBoard("x"), set(), id="board of epochs"),
        pytest.param(K.TensorBoard("x", update_freq="batch"), {"train", "test"}, id="of batches"),
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
