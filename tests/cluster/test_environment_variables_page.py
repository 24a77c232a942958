"""The page docs/cluster.md: its Python runs, its TF_CONFIG is valid, its manifest is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfdist_ext.cluster import ClusterConfig, Task, config

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"no {language} on the page"
    return found


def test_the_python_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in _blocks("python"):
        exec(compile(block, "docs/cluster.md", "exec"), {})
    assert "TF_CONFIG: " in capsys.readouterr().out


def test_the_tf_config_on_the_page_is_valid() -> None:
    (text,) = _blocks("json")
    config = ClusterConfig.from_tf_config(text)
    assert config.task == Task("worker", 0)
    assert config.num_tasks == 5


def test_the_manifest_sets_what_kubernetes_does_not() -> None:
    (text,) = _blocks("yaml")
    by_you = dict(re.findall(r'name: (TFDIST_\w+), value: "?(\w+)"?', text))
    (completions,) = re.findall(r"completions: (\d+)", text)
    (job,) = re.findall(r"job-name: (\w+)", text)
    by_kubernetes = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": f"{job}-3"}
    config = ClusterConfig.from_env(by_you | by_kubernetes)
    assert config is not None
    assert config.num_tasks == int(completions)
    assert config.address == "train-3.peers:22222"
    assert f"subdomain: {by_you['TFDIST_JOB_SERVICE']}" in text


def test_the_page_gives_the_order_of_precedence() -> None:
    section = PAGE.partition("## Environments\n")[2].partition("\n###")[0]
    order = re.findall(r"^\d\. ([\w ]+)", section, re.MULTILINE)
    assert order == list(config.ENVIRONMENTS)
