"""TFRecord files as TensorFlow writes them, and a cache folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def as_many_cpus_as_elsewhere(four_cpus: None) -> None:
    """Whichever of these modules a process runs first, others may want several CPUs."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder is not that of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg-cache"))
    return tmp_path / "xdg-cache" / "tfdist_ext"


@pytest.fixture
def folder_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """A folder of this machine ("local"), or of another file system ("ram")."""
    from tfdist_ext.data import record_index

    real = record_index.stamp_of

    def folder(kind: str) -> str:
        if kind == "local":
            return str(tmp_path)
        # ram:// knows no times, and an index is kept only where there are some.
        monkeypatch.setattr(
            record_index, "stamp_of", lambda path: real(path)._replace(modified_ns=1)
        )
        return f"ram://{tmp_path}"

    return folder


@pytest.fixture
def write_records(four_cpus: None) -> Callable[[str | Path, Sequence[bytes]], str]:
    import tensorflow as tf

    def write(path: str | Path, payloads: Sequence[bytes]) -> str:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for payload in payloads:
                writer.write(payload)
        return str(path)

    return write
