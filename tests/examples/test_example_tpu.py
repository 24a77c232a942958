"""The example tpu: what is understood of the settings, and errors that say what was looked for."""

from __future__ import annotations

import time

import pytest
import tpu as example


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
def test_settings_name_the_servers_and_the_task(
    tpu: str, options: dict[str, str], master: str, cluster: dict[str, list[str]], job: str | None
) -> None:
    task = (job or next(iter(cluster)), 0)
    assert example.settings(tpu, **options) == {"master": master, "cluster": cluster, "task": task}


@pytest.mark.parametrize(
    ("tpu", "words"),
    [
        ("local", ["'local'", "TPUs not found", "CPU:0"]),
        ("grpc://127.0.0.1:1", ["'grpc://127.0.0.1:1'", "127.0.0.1:1"]),
    ],
)
def test_the_error_of_the_plain_way_says_what_was_looked_for(tpu: str, words: list[str]) -> None:
    """That of create_strategy: tests/strategies/test_tpu.py."""
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        example.plain(tpu)
    assert time.monotonic() - begun < 5
    for word in ["no TPU", *words]:
        assert word in str(raised.value)


def test_its_main(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("plain, 0.", "with_tfdist_ext, 0.")) for line in lines) == 4
