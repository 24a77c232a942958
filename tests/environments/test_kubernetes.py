"""configs/kubernetes: valid manifests, played with a process for each pod."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
import yaml
from kubernetes_controllers import JobController, JobSetController, Manifest
from kubernetes_pods import played
from real_jobs import EPOCHS, ROOT, STEPS, Result, assert_equal, result_in, training

from tfdist_ext.cluster import ClusterConfig

pytestmark = pytest.mark.timeout(280)
on_hosts = pytest.mark.skipif(bool(namespaces.WHY_NOT), reason=namespaces.WHY_NOT or "-")
TEMPLATES = ROOT / "configs" / "kubernetes"


def manifests(
    template: str,
    command: list[str] | None = None,
    *,
    max_restarts: int | None = None,
) -> list[Manifest]:
    """The manifests of a template, edited as its comments say.

    Args:
        template: "job" or "jobset".
        command: what each pod runs.
        max_restarts: failures that count.
    """
    documents = list(yaml.safe_load_all((TEMPLATES / f"{template}.yaml").read_text()))
    spec = documents[-1]["spec"]
    jobs = [spec] if template == "job" else list(specs_of(documents[-1]))
    for each in jobs:
        if max_restarts is not None and "backoffLimitPerIndex" in each:
            each["backoffLimitPerIndex"] = max_restarts
        (container,) = each["template"]["spec"]["containers"]
        container["command"] = command or container["command"]
    if max_restarts is not None and template == "jobset":
        spec["failurePolicy"]["maxRestarts"] = max_restarts
    return copy.deepcopy(documents)  # anchors of the file are one object in Python


# Valid.


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
@pytest.mark.parametrize("template", ["job", "jobset"])
def test_kubernetes_takes_them(template: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")  # of the extra environments
    for document in manifests(template):
        checked = [document]
        if document["kind"] == "JobSet":  # which makes these Jobs
            checked = [
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
                for spec in specs_of(document)
            ]
        for each in checked:
            kubernetes_validate.validate(each, version, strict=True)
            damaged = copy.deepcopy(each)
            damaged["spec"]["unknown"] = 1
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(damaged, version, strict=True)


def test_jobset_takes_it() -> None:
    jsonschema = pytest.importorskip("jsonschema")  # of the extra environments
    schema = json.loads((Path(__file__).parent / "jobset_v1alpha2.json").read_text())
    assert "v0.12.0" in schema["$comment"]
    validator = jsonschema.Draft202012Validator(_strict(schema))
    jobset = manifests("jobset")[-1]
    assert not list(validator.iter_errors(jobset))
    for path in (("spec",), ("spec", "failurePolicy", "rules", 0), ("spec", "replicatedJobs", 0)):
        damaged: Any = copy.deepcopy(jobset)
        at = damaged
        for key in path:
            at = at[key]
        at["unknown"] = 1
        assert list(validator.iter_errors(damaged)), path


def _strict(schema: Any) -> Any:
    """As the server has it: a field that is not known is refused."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    keeps = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not keeps:
        strict["additionalProperties"] = False
    return strict


def specs_of(document: Manifest) -> Iterator[Manifest]:
    """The specs of the Jobs of a JobSet."""
    for each in document["spec"]["replicatedJobs"]:
        yield each["template"]["spec"]


# The policies, without processes.


def test_what_the_controller_of_a_job_makes_of_statuses() -> None:
    controller = JobController("train", manifests("job", max_restarts=1)[-1]["spec"])
    for disrupted, status in ((True, 137), (False, 143), (False, 143), (True, 1)):
        for pod in controller.wanted:
            controller.ended(pod, status, disrupted)
    assert not controller.counted
    for pod, status in zip(controller.wanted, (137, 138), strict=True):
        controller.ended(pod, status)  # a failure of one is one of each index
    assert controller.counted == {0: 1, 1: 1}
    assert not controller.state
    controller.ended(controller.wanted[1], 137)
    assert (controller.state, controller.reason) == ("Failed", "MaxFailedIndexesExceeded")


def jobset(**keys: Any) -> JobSetController:
    return JobSetController("train", manifests("jobset", **keys)[-1]["spec"])


def end(controller: JobSetController, hostname: str, status: int) -> None:
    (pod,) = [pod for pod in controller.wanted if pod.hostname == hostname]
    controller.ended(pod, status)


CHIEF, WORKER, PS = "train-chief-0-0", "train-worker-0-1", "train-ps-0-0"
EVALUATOR = "train-evaluator-0-0"


@pytest.mark.parametrize(
    ("ends", "state", "restarts"),
    [
        ([(CHIEF, 0)], "", 0),  # there may be a checkpoint to evaluate
        ([(CHIEF, 0), (EVALUATOR, 0)], "Completed", 0),
        ([(CHIEF, 143), (PS, 138), (WORKER, 138), (EVALUATOR, 138)] * 5, "", 0),
        ([(PS, 137), (WORKER, 138), (CHIEF, 138)], "", 1),
        ([(CHIEF, 137)] * 2, "", 2),
        ([(CHIEF, 137)] * 3, "Failed", 2),
        ([(WORKER, 137)] * 2, "", 0),  # it comes back alone
        ([(WORKER, 137)] * 3, "Failed", 0),
        ([(CHIEF, 1)], "Failed", 0),
        ([(EVALUATOR, 127)], "Failed", 0),
        ([(WORKER, 138), (CHIEF, 3)], "Failed", 0),  # in whatever order they are seen
    ],
)
def test_what_the_controller_of_a_jobset_makes_of_statuses(
    ends: list[tuple[str, int]], state: str, restarts: int
) -> None:
    controller = jobset(max_restarts=2)
    for hostname, status in ends:
        end(controller, hostname, status)
    assert (controller.state, controller.restarts) == (state, restarts)


# The image, and the page.


def test_the_image_is_made_of_what_there_is(tmp_path: Path) -> None:
    lines = (TEMPLATES / "Dockerfile").read_text(encoding="utf-8").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    allowed = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "CMD"}
    assert {step[0] for step in steps} == allowed
    for _, *sources, target in (step for step in steps if step[0] == "COPY"):
        for source in sources:
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=ignored)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    install, user = (step[1:] for step in steps if step[0] == "RUN")
    assert install == ["pip", "install", "--no-cache-dir", ".[records]"]
    # What is copied is enough to build the package.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", "wheels", "."]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    (wheel,) = (tmp_path / "wheels").glob("tfdist_ext-*.whl")
    assert "tfdist_ext/cli/run.py" in zipfile.ZipFile(wheel).namelist()
    ((_, number),) = (step for step in steps if step[0] == "USER")
    assert user[:3] == ["useradd", "--uid", number]
    pod = manifests("job")[-1]["spec"]["template"]["spec"]
    assert str(pod["securityContext"]["runAsUser"]) == number


def test_what_a_tfjob_writes_is_read() -> None:
    """Its TF_CONFIG, as genTFConfigJSONStr of Kubeflow's training-operator v1.9.0 writes it."""
    tfjob = yaml.safe_load((TEMPLATES / "tfjob.yaml").read_text())
    name, specs = tfjob["metadata"]["name"], tfjob["spec"]["tfReplicaSpecs"]
    cluster = {
        role.lower(): [
            f"{name}-{role.lower()}-{index}.default.svc:2222" for index in range(spec["replicas"])
        ]
        for role, spec in specs.items()
    }
    for role, addresses in cluster.items():
        for index, address in enumerate(addresses):
            task = {"type": role, "index": index}
            config = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
            assert ClusterConfig.from_env({"TF_CONFIG": config}).address == address
    assert {spec["restartPolicy"] for spec in specs.values()} == {"ExitCode"}


# Played.


@on_hosts
def test_workers_come_back(tmp_path: Path, undisturbed: Result) -> None:
    """A worker is killed, then another pod of it is preempted, which does not count."""
    documents = manifests("job", training(tmp_path), max_restarts=1)
    with played(documents, tmp_path, 6) as pods:
        pods.until("train-1", "STEP 5\n")
        pods.kill("train-1")
        pods.until("train-1", "STEP 10\n")
        pods.delete("train-1")
        assert pods.until_ended() == "Complete", pods.describe("")
        assert pods.ends[:2] == [("train-1", 137), ("train-0", 138)]
        assert sorted(pods.ends[2:4]) == [("train-0", 143), ("train-1", 143)]
        assert pods.controller.counted == {0: 1, 1: 1}
        assert "STEP 1\n" not in pods.logs["train-0"][2].read_text()  # it resumes
    assert_equal(result_in(tmp_path), undisturbed)


@on_hosts
@pytest.mark.long("chief", "train-ps")
@pytest.mark.parametrize("killed", ["train-chief-0-0", "train-ps-0-0", "train-worker-0-1"])
def test_all_roles(killed: str, tmp_path: Path) -> None:
    """All start again without a task that holds the state of the training; a worker alone."""
    documents = manifests("jobset", training(tmp_path, pause=0.2))
    with played(documents, tmp_path, 12) as pods:
        pods.until("train-chief-0-0", "STEP 10\n")
        pods.kill(killed)
        assert pods.until_ended() == "Completed", pods.describe("")
        assert pods.controller.restarts == (0 if "worker" in killed else 1)
        assert pods.ends[0] == (killed, 137)
    assert result_in(tmp_path)["iterations"] == EPOCHS * STEPS
