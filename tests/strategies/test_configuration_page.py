"""docs/configuration.md: its Python runs, and prints what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags

import tfdist_ext as tfd
from tfdist_ext.strategies import registry

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
OURS = (
    "strategy",
    "strategy_config",
    "devices",
    "logical_cpus",
    "communication",
    "bucket_bytes",
    "wait",
)


@pytest.fixture
def _as_before() -> Iterator[None]:
    table = dict(registry._TABLE)
    yield
    registry._TABLE.clear()
    registry._TABLE.update(table)
    for name in OURS:
        if name in flags.FLAGS:
            delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()


@pytest.mark.usefixtures("_as_before")
def test_the_python_on_the_page_runs_and_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = dict(registry._TABLE)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    Path("strategy.toml").write_text(toml)
    printed = ""
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/configuration.md", "exec"), {})
        printed += capsys.readouterr().out
        registry._TABLE.clear()
        registry._TABLE.update(table)
        for name in OURS:
            if name in flags.FLAGS:
                delattr(flags.FLAGS, name)  # of one block only
    outputs = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(outputs) == 2
    assert [text for text in outputs if text not in printed] == []


def test_the_table_lists_every_strategy_with_its_options() -> None:
    section = PAGE.partition("## The strategies\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", section, re.MULTILINE))
    known = tfd.available_strategies()
    for name in rows:
        description, _, options = rows[name].partition(" | ")
        assert description == known[name]
        assert re.findall(r"`(\w+)`", options) == registry.lookup(name).options
    assert set(rows) >= {"default", "mirrored", "tpu"}
