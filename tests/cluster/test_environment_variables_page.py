"""docs/environment_variables.md: its Python runs, its TF_CONFIG is valid, its order is right."""

from __future__ import annotations

import re
from pathlib import Path

from tfdist_ext.cluster import ClusterConfig, Task, config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environment_variables.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"no {language} on the page"
    return found


def test_python_on_the_page_runs() -> None:
    for block in _blocks("python"):
        exec(compile(block, "docs/environment_variables.md", "exec"), {})


def test_tf_config_on_the_page_is_valid() -> None:
    (text,) = _blocks("json")
    config = ClusterConfig.from_tf_config(text)
    assert config.task == Task("worker", 0)
    assert config.num_tasks == 5


def test_job_template_sets_the_required_variables() -> None:
    text = (ROOT / "configs" / "kubernetes" / "job.yaml").read_text(encoding="utf-8")
    by_you = dict(re.findall(r'name: (TFDIST_\w+), value: "?(\w+)"?', text))
    (completions,) = re.findall(r"completions: (\d+)", text)
    (job,) = set(re.findall(r"job-name: (\w+)", text))
    by_kubernetes = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{job}-1"}
    config = ClusterConfig.from_env(by_you | by_kubernetes)
    assert config is not None
    assert config.num_tasks == int(completions)
    assert config.address == "train-1.train:22222"
    assert f"subdomain: {by_you['TFDIST_JOB_SERVICE']}" in text


def test_page_gives_the_order_of_precedence() -> None:
    section = PAGE.partition("## Schedulers\n")[2].partition("\n###")[0]
    order = re.findall(r"^\d\. ([\w ]+)", section, re.MULTILINE)
    assert order == list(config.ENVIRONMENTS)
