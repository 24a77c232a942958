"""The example tpu: what is understood of the settings, and errors that say what was looked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tpu as example

import tfdist_ext as tfd


@pytest.mark.parametrize(
    ("tpu", "options", "master", "cluster", "job"),
    [
        ("local", {}, "", {}, "worker"),
        ("grpc://10.0.0.2:8470", {}, "grpc://10.0.0.2:8470", {"worker": ["10.0.0.2:8470"]}, None),
        (
            "grpc://10.0.0.2:8470,10.0.0.3:8470",
            {"job_name": "tpu_worker"},
            "grpc://10.0.0.2:8470",
            {"tpu_worker": ["10.0.0.2:8470", "10.0.0.3:8470"]},
            None,
        ),
    ],
)
def test_settings(
    tpu: str, options: dict[str, str], master: str, cluster: dict[str, list[str]], job: str | None
) -> None:
    found = example.settings(tpu, **options)
    task = (job or next(iter(cluster)), 0)
    assert found == {"master": master, "cluster": cluster, "task": task}


@pytest.mark.parametrize(
    ("create", "error"),
    [(example.plain, RuntimeError), (example.with_tfdist_ext, tfd.StrategyError)],
)
@pytest.mark.parametrize(
    ("tpu", "words"),
    [
        ("local", ["'local'", "TPUs not found", "CPU:0"]),
        ("grpc://127.0.0.1:1", ["'grpc://127.0.0.1:1'", "127.0.0.1:1"]),
    ],
)
def test_the_error_says_what_was_looked_for(
    create: Callable[[str], Any], error: type[Exception], tpu: str, words: list[str]
) -> None:
    begun = time.monotonic()
    with pytest.raises(error) as raised:
        create(tpu)
    assert time.monotonic() - begun < 5
    for word in ["no TPU", *words]:
        assert word in str(raised.value)


def test_its_main(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("plain, 0.", "with_tfdist_ext, 0.")) for line in lines) == 4
