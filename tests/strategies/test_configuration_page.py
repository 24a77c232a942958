"""docs/configuration.md: its Python runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from absl import flags

import tfdist_ext as tfd
from tfdist_ext.strategies import registry

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_python_on_the_page_runs_and_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    Path("strategy.toml").write_text(toml)
    printed = ""
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        # Flags and registered strategies are of one block only.
        with monkeypatch.context() as patch:
            patch.setattr(flags, "FLAGS", flags.FlagValues())
            patch.setattr(registry, "_TABLE", dict(registry._TABLE))
            exec(compile(block, "docs/configuration.md", "exec"), {})
        printed += capsys.readouterr().out
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
