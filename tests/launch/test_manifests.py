"""`tfdist kubernetes`: what its manifests say, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext import cli
from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.exit_codes import outcome_of
from tfdist_ext.launch.schedulers.job_file import Job, read_job
from tfdist_ext.launch.schedulers.manifests import manifests, manifests_text

ALL = """
name = "digits"
command = "python train.py --data '/data/my file'"
nodes = 2
workers_per_node = 2
ps = 1
evaluator = true
gpus_per_node = 2
max_restarts = 5
grace = 60
env = { DATA = "gs://bucket", NOTE = "a$(b)" }
[kubernetes]
image = "registry.example.com/train:1"
namespace = "research"
cpu = "4"
memory = "16Gi"
active_deadline_seconds = 86400
service_account = "trainer"
node_selector = { pool = "gpu" }
volume = { claim = "checkpoints", path = "/work" }
ps = { memory = "32Gi" }
chief = { cpu = "500m", gpus = 1 }
"""


def made(folder: Path, text: str) -> list[dict[str, Any]]:
    (folder / "job.toml").write_text(text)
    printed = manifests_text(read_job(folder / "job.toml"))
    assert "&" not in printed  # no anchors: a person reads it
    documents = list(yaml.safe_load_all(printed))
    assert documents == manifests(read_job(folder / "job.toml"))
    return documents


def test_workers_alone_are_an_indexed_job(tmp_path: Path) -> None:
    text = 'command = "python train.py"\nnodes = 3\n[kubernetes]\nimage = "train:1"\n'
    policy, service, job = made(tmp_path, text)
    assert [each["kind"] for each in (policy, service, job)] == ["NetworkPolicy", "Service", "Job"]
    pods = {"batch.kubernetes.io/job-name": "job"}  # which Kubernetes sets
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods,
    }  # fmt: skip
    assert policy["spec"]["podSelector"] == {"matchLabels": pods}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": pods}}]}]
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert "backoffLimit" not in spec  # which would count a failure of one three times
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == "job"
    (container,) = pod["containers"]
    assert container["command"] == ["python", "train.py"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env["TFDIST_JOB_SIZE"] == "3"
    assert env["TFDIST_JOB_SERVICE"] == "job"
    assert env["TFDIST_STARTS_AGAIN"] == "1"
    assert pod["terminationGracePeriodSeconds"] > int(env["TFDIST_GRACE"]) == 90
    assert not {"livenessProbe", "readinessProbe", "startupProbe"} & container.keys()


def test_all_roles_are_a_jobset(tmp_path: Path) -> None:
    policy, jobset = made(tmp_path, ALL)
    assert jobset["metadata"] == {"name": "digits", "namespace": "research"} == policy["metadata"]
    assert policy["spec"]["podSelector"] == {
        "matchLabels": {"jobset.sigs.k8s.io/jobset-name": "digits"}
    }
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief", "evaluator"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 5
    specs = {each["name"]: each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]}
    sizes = {role: spec["completions"] for role, spec in specs.items()}
    assert sizes == {"chief": 1, "worker": 4, "ps": 1, "evaluator": 1}
    assert {role: spec.get("backoffLimit") for role, spec in specs.items()} == {
        "chief": 0, "worker": None, "ps": None, "evaluator": None,
    }  # fmt: skip
    resources = {}
    for role, spec in specs.items():
        assert spec["activeDeadlineSeconds"] == 86400
        pod = spec["template"]["spec"]
        assert pod["serviceAccountName"] == "trainer"
        assert pod["nodeSelector"] == {"pool": "gpu"}
        assert pod["terminationGracePeriodSeconds"] == 90
        (container,) = pod["containers"]
        assert container["command"] == ["python", "train.py", "--data", "/data/my file"]
        env = {each["name"]: each["value"] for each in container["env"]}
        assert env["TFDIST_JOBSET_TASKS"] == "chief=1,worker=4,ps=1,evaluator=1"
        assert (env["DATA"], env["NOTE"]) == ("gs://bucket", "a$$(b)")
        (mount,) = container["volumeMounts"]
        (volume,) = pod["volumes"]
        assert (mount["name"], mount["mountPath"]) == (volume["name"], "/work")
        assert volume["persistentVolumeClaim"] == {"claimName": "checkpoints"}
        resources[role] = container["resources"]
    gpu = "nvidia.com/gpu"
    assert resources == {
        "chief": {"requests": {"cpu": "500m", "memory": "16Gi"},
                  "limits": {"memory": "16Gi", gpu: 1}},
        "worker": {"requests": {"cpu": "4", "memory": "16Gi"},
                   "limits": {"memory": "16Gi", gpu: 1}},
        "ps": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "32Gi"}},
        "evaluator": {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "leads"),
    [
        ({"nodes": 2}, {"worker"}),
        ({"nodes": 2, "evaluator": True}, {"worker", "evaluator"}),
        ({"nodes": 2, "chief": True}, {"chief"}),
        ({"nodes": 2, "ps": 1, "evaluator": True}, {"chief", "evaluator"}),
    ],
)
def test_the_policies_say_what_the_exit_codes_say(keys: dict[str, Any], leads: set[str]) -> None:
    job = manifests(Job("train", ("x",), scheduler=IMAGE, **keys))[-1]
    jobs = {"worker": job["spec"]}
    if job["kind"] == "JobSet":
        jobs = {each["name"]: each["template"]["spec"] for each in job["spec"]["replicatedJobs"]}
        assert set(job["spec"]["successPolicy"]["targetReplicatedJobs"]) == leads
    driver = "chief" if "chief" in jobs else "worker"
    for role, spec in jobs.items():
        disrupted, not_counted, permanent = spec["podFailurePolicy"]["rules"]
        assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert [disrupted["action"], not_counted["action"]] == ["Ignore", "Ignore"]
        assert permanent["action"] == "FailJob"
        for status in range(1, 256):
            failed = status in permanent["onExitCodes"]["values"]
            assert failed == (outcome_of(status) == "failed")
            free = status in not_counted["onExitCodes"]["values"]
            # 138 of a task that does not lead: because of one that does, and which counts.
            assert free == (status == 143 or (status == 138 and role != driver))


def test_no_pod_has_privileges() -> None:
    for keys in ({}, {"ps": 1, "evaluator": True}):
        document = manifests(Job("train", ("x",), scheduler=IMAGE, **keys))[-1]
        specs = [document["spec"]]
        if document["kind"] == "JobSet":
            specs = [each["template"]["spec"] for each in document["spec"]["replicatedJobs"]]
        for spec in specs:
            pod = spec["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] == 1000
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["containers"][0]["securityContext"] == {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip


IMAGE = {"kubernetes": {"image": "train:1"}}
REFUSED = (
    ("", "kubernetes: image must be what each pod runs, got none"),
    ("[kubernetes]\nimag = 'x'", "unknown key 'imag'. Did you mean \"image\"?"),
    ("[kubernetes]\nimage = 1", "image must be text, got 1"),
    ("[kubernetes]\nimage = 'x'\ncpu = 'four'", "cpu must be a quantity, got 'four'"),
    ("[kubernetes]\nimage = 'x'\nworker.memory = '16 Gi'", "memory must be a quantity"),
    ("[kubernetes]\nimage = 'x'\nps.cpu = '1'", "kubernetes.ps must be of a role of this job"),
    ("[kubernetes]\nimage = 'x'\nworker.gpu = 1", "kubernetes.worker: unknown key 'gpu'"),
    ("[kubernetes]\nimage = 'x'\nworker.gpus = -1", "gpus must be at least 0, got -1"),
    ("[kubernetes]\nimage = 'x'\nvolume.path = '/x'", "claim must name a PersistentVolumeClaim"),
    ("[kubernetes]\nimage = 'x'\nvolume = {claim = 'c', path = 'x'}", "path must be absolute"),
    ("[kubernetes]\nimage = 'x'\nuser = 0", "user must be at least 1, got 0"),
    ("[kubernetes]\nimage = 'x'\nnode_selector = {gpu = true}", "gpu must be text, got True"),
    ("gpus_per_node = 3\nworkers_per_node = 2\n[kubernetes]\nimage = 'x'", "gpus_per_node must be"),
    ("name = '9lives'\n[kubernetes]\nimage = 'x'", "name must begin with a letter"),
    (f"name = '{'a' * 50}'\nevaluator = true\n[kubernetes]\nimage = 'x'", "at most 43 characters"),
)


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_what_cannot_be_right_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "job.toml").write_text(f"command = 'python train.py'\n{text}\n")
    assert cli.main(["kubernetes", str(path)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"tfdist: error: {path}")
    assert says in printed.err
    assert ", got " in printed.err or "unknown key" in printed.err


def test_longest_names_fit() -> None:
    name = "a" * 43
    manifests(Job(name, ("x",), evaluator=True, scheduler=IMAGE))
    assert len(f"{name}-evaluator-0-0-abcde") == 63
    with pytest.raises(LaunchError, match="at most 43 characters on Kubernetes"):
        manifests(Job(name + "a", ("x",), evaluator=True, scheduler=IMAGE))


def test_what_is_not_for_kubernetes_is_said() -> None:
    text = manifests_text(Job("train", ("x",), nodes=3, min_workers=2, scheduler=IMAGE))
    assert text.startswith("# min_workers = 2 is not for Kubernetes")


@given(st.lists(st.sampled_from(["$", "(", ")", "A", "$(", "$$", " "]), max_size=8).map("".join))
def test_commands_come_through_as_they_are(word: str) -> None:
    (*_, job) = manifests(Job("train", (word, "x"), scheduler=IMAGE))
    assert expanded(job["spec"]["template"]["spec"]["containers"][0]["command"][0]) == word


def expanded(text: str) -> str:
    """What Kubernetes makes of a word: $$ is $, $(NAME) a variable."""
    result, at = "", 0
    while at < len(text):
        if text[at : at + 2] == "$$":
            result, at = result + "$", at + 2
        elif text[at : at + 2] == "$(" and ")" in text[at:]:
            result, at = result + "?", text.index(")", at) + 1
        else:
            result, at = result + text[at], at + 1
    return result
