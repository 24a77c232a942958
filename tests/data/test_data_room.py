"""The room's names, and what its arithmetic does not wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tfdist_ext.data
import tfdist_ext.errors


def test_the_public_names() -> None:
    assert sorted(tfdist_ext.data.__all__) == tfdist_ext.data.__all__
    for name in tfdist_ext.data.__all__:
        assert getattr(tfdist_ext.data, name).__name__ == name
        assert name in dir(tfdist_ext.data)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tfdist_ext.data.nonsense


def test_the_error_is_one_of_the_package() -> None:
    import tfdist_ext as tfd

    assert tfd.DataError is tfd.data.DataError
    assert issubclass(tfd.DataError, (tfd.TfDistError))
    assert issubclass(tfd.DataError, ValueError)
    assert "── DataError " in (tfdist_ext.errors.__doc__ or "")


def test_shards_need_no_tensorflow() -> None:
    code = """
import sys
from tfdist_ext.data import Remainder, Shard, shard_range
print(shard_range(7, Shard(1, 2), Remainder.PAD), {"tensorflow"} & {*sys.modules})
"""
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.strip() == "ShardRange(start=3, stop=7, padding=0) set()"
