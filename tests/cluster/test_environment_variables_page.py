"""docs/environment_variables.md: its TF_CONFIG is valid, its order is right."""

from __future__ import annotations

import re

from pages import ROOT, blocks_of

from tfdist_ext.cluster import ClusterConfig, Task, config

PAGE = "docs/environment_variables.md"


def test_tf_config_on_the_page_is_valid() -> None:
    (text,) = [block.text for block in blocks_of(PAGE) if block.language == "json"]
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
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    section = page.partition("## Schedulers\n")[2].partition("\n###")[0]
    order = re.findall(r"^\d\. ([\w ]+)", section, re.MULTILINE)
    assert order == list(config.ENVIRONMENTS)
