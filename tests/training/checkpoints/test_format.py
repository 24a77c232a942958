"""The file of a checkpoint, and the values in it: a changed byte is detected."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from training_cases import X, Y, classifier, mirrored, strategy_of

import tfdist_ext as tfd
from tfdist_ext.training import state
from tfdist_ext.training.checkpoints.format import (
    CheckpointFile,
    DamagedCheckpointError,
    Progress,
    encode_checkpoint,
    open_checkpoint,
)
from tfdist_ext.training.state import assign_whole, state_of, whole_value

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint32", "int64", "bool"]


def variables_of(model: tfd.DistributedModel) -> list[Any]:
    return list(state_of(model.keras_model).values())


def copies_of(model: tfd.DistributedModel) -> list[np.ndarray]:
    """The value of each variable on each replica."""
    local = model.strategy.experimental_local_results
    return [copy.numpy() for v in variables_of(model) for copy in local(v.value)]


def fill(model: tfd.DistributedModel, value: int) -> None:
    for variable in variables_of(model):
        assign_whole(variable, np.full(variable.shape, value, whole_value(variable).dtype))


@pytest.fixture(scope="module")
def model() -> tfd.DistributedModel:
    """On two replicas, with everything that a checkpoint can hold."""
    model = tfd.distribute(classifier("adam"), mirrored())
    model.fit(X, Y, batch_size=16, verbose=0)
    return model


@pytest.fixture(scope="module")
def saved(model: tfd.DistributedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "saved"
    model.save_checkpoint(path)
    return path


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """(the header, place of the first value), by the description of safetensors."""
    held = path.read_bytes()
    length = int.from_bytes(held[:8], "little")
    return json.loads(held[8 : 8 + length]), 8 + length


def test_the_file_is_in_the_safetensors_format(model: tfd.DistributedModel, saved: Path) -> None:
    header, begin = header_of(saved)
    assert begin % 8 == 0
    assert all(isinstance(text, str) for text in header.pop("__metadata__").values())
    held, end, found = saved.read_bytes(), 0, {}
    codes = {"F32": "<f4", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1"}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end  # one after another, without holes
        end = stop
        data = held[begin + start : begin + stop]
        found[name] = np.frombuffer(data, codes[entry["dtype"]]).reshape(entry["shape"])
    assert begin + end == len(held)
    for name, variable in state_of(model.keras_model).items():
        np.testing.assert_array_equal(found[name], whole_value(variable))
    assert found["crc32"].tolist() == [zlib.crc32(held[:-4])]


def test_a_changed_byte_is_detected_before_the_model_changes(
    model: tfd.DistributedModel, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "BLOCK_BYTES", 16)  # most arrays have several blocks
    good, held = copies_of(model), saved.read_bytes()
    header, begin = header_of(saved)
    ends = [begin + entry["data_offsets"][1] for n, entry in header.items() if n[0] != "_"]
    places = [*range(0, begin, 37), *(end - 1 for end in ends), *range(begin, len(held), 211)]
    fill(model, 7)
    before, path = copies_of(model), tmp_path / "damaged"
    for place in places:
        changed = bytearray(held)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match="is not a complete checkpoint"):
            model.restore_checkpoint(path)
    for length in (0, 5, begin // 2, begin, len(held) // 2, len(held) - 1):
        path.write_bytes(held[:length])
        with pytest.raises(DamagedCheckpointError, match="is not a complete checkpoint"):
            model.restore_checkpoint(path)
    np.testing.assert_equal(copies_of(model), before)
    progress = model.restore_checkpoint(saved)
    np.testing.assert_equal(copies_of(model), good)
    assert (progress.epoch, progress.step) == (1, 4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    def refused(name: str, words: str, content: bytes | None = None) -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(tfd.TrainingError, match=words), open_checkpoint(str(tmp_path / name)):
            pass

    progress = encode_checkpoint(Progress(), {})
    version_2 = b"".join(progress).replace(rb"\"version\": 1", rb"\"version\": 2")[:-4]
    version_2 += zlib.crc32(version_2).to_bytes(4, "little")
    refused("version", "has format 2, and this tfdist_ext reads format 1", version_2)
    refused("missing", r"missing cannot be read: No such file or directory\. Check the path")
    refused(".", r" cannot be read: Is a directory\.")
    refused("text", "is not a complete checkpoint", b"weights of something else")
    refused("zeros", "is not a complete checkpoint", bytes(4))


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_whole_values_of_every_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "BLOCK_BYTES", 24)
    strategy = strategy_of(name)
    for dtype in DTYPES:
        for shape in ((10, 3), (7,), (), (0, 3)):
            with strategy.scope():
                variable = keras.Variable(np.zeros(shape), dtype=dtype, trainable=False)
            value = np.arange(np.prod(shape)).reshape(shape).astype(whole_value(variable).dtype)
            assign_whole(variable, value)
            np.testing.assert_array_equal(whole_value(variable), value)
            for copy in strategy.experimental_local_results(variable.value):
                np.testing.assert_array_equal(copy.read_value().numpy(), value)
            copied = whole_value(variable)
            assign_whole(variable, np.zeros(shape))
            np.testing.assert_array_equal(copied, value)


def test_big_variables_are_read_and_written_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a block is in memory: an embedding may need several servers."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(1000, 8)])
        model.compile("sgd", "mse")
        return model

    def counted(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def call(*args: Any) -> np.ndarray:
            rows = function(*args)
            sizes.append(rows.nbytes)
            return rows

        return call

    sizes: list[int] = []
    model, other = (tfd.distribute(build, strategy_of(n)) for n in ("mirrored", "central_storage"))
    monkeypatch.setattr(state, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(
        "tfdist_ext.training.checkpoints.format.read_rows", counted(state.read_rows)
    )
    monkeypatch.setattr(CheckpointFile, "read_rows", counted(CheckpointFile.read_rows))
    model.save_checkpoint(tmp_path / "one")
    other.restore_checkpoint(tmp_path / "one")
    assert sum(sizes) > 2 * 32_000
    assert max(sizes) == 1024
    for one, restored in zip(variables_of(model), variables_of(other), strict=True):
        np.testing.assert_array_equal(whole_value(restored), whole_value(one))
