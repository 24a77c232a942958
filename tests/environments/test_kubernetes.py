"""The manifests of `tfdist kubernetes`: valid, and played with a process for each pod."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import namespaces
import pytest
from conftest import Result, assert_equal, result_in, training
from kubernetes_controllers import JobController, JobSetController
from kubernetes_pods import controller_of, played

from tfdist_ext.launch.schedulers.job_file import Job
from tfdist_ext.launch.schedulers.manifests import manifests

pytestmark = pytest.mark.timeout(280)
on_hosts = pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT or "-")

EPOCHS, STEPS = 3, 8


def job(command: list[str] | None = None, **keys: Any) -> Job:
    settings = {"image": "train:1", **keys.pop("kubernetes", {})}
    keys.setdefault("nodes", 2)
    return Job(
        "train",
        tuple(command or ["python", "train.py"]),
        scheduler={"kubernetes": settings},
        **keys,
    )


@on_hosts
def test_a_worker_that_is_killed_comes_back(
    tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    documents = manifests(job(training(tmp_path, EPOCHS, STEPS, 0.1)))
    with played(documents, tmp_path, 6) as pods:
        pods.until("train-1", "STEP 10\n")
        pods.kill("train-1")
        state = pods.until_ended()
        print(pods.ends)
        assert state == "Complete", pods._told("")
        assert pods.ends[:2] == [("train-1", 137), ("train-0", 138)]
        assert pods.controller.counted == {0: 1, 1: 1}
    assert_equal(result_in(tmp_path), undisturbed(EPOCHS, STEPS))
