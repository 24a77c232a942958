"""The manifests of a job for Kubernetes: an indexed Job of workers, or a JobSet of all roles.

A pod is one task. Nothing there knows which task failed first, so all follows from the exit status
of each (`exit_codes.py`). The tasks that lead are the chief, or the workers where there is none:
where one of them fails a JobSet starts all pods anew, and counts that. Another one that says
"start me again" fails because of them, and they count it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tfdist_ext.errors import LaunchError
from tfdist_ext.launch.command_line import STARTS_AGAIN
from tfdist_ext.launch.exit_codes import GRACE, PREEMPTED, RESTART
from tfdist_ext.launch.plan import tasks_of
from tfdist_ext.launch.schedulers.job_file import Job, check_table
from tfdist_ext.messages import optional_module, shown

__all__ = ["manifests", "manifests_text"]

Manifest: TypeAlias = dict[str, Any]

_ROLES = ("chief", "worker", "ps", "evaluator")
_KEYS: dict[str, tuple[type, int]] = {
    "image": (str, 0),
    "namespace": (str, 0),
    "cpu": (str, 0),
    "memory": (str, 0),
    "gpu_resource": (str, 0),
    "volume": (dict, 0),
    "active_deadline_seconds": (int, 1),
    "service_account": (str, 0),
    "user": (int, 1),
    "node_selector": (dict, 0),
    **dict.fromkeys(_ROLES, (dict, 0)),
}
_OF_ROLE: dict[str, tuple[type, int]] = {"cpu": (str, 0), "memory": (str, 0), "gpus": (int, 0)}
_OF_VOLUME: dict[str, tuple[type, int]] = {"claim": (str, 0), "path": (str, 0)}
_USUAL: dict[str, Any] = {"gpu_resource": "nvidia.com/gpu", "user": 1000, "node_selector": {}}
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # of what is found in DNS
_LONGEST_NAME = 63
_MARGIN = 30  # seconds for a task to end once it has saved
_PERMANENT = list(range(1, 128))
# Of a failed Job of a JobSet: why another start would fail, too.
_FOR_GOOD = ["PodFailurePolicy", "MaxFailedIndexesExceeded", "DeadlineExceeded"]


def manifests_text(job: Job, where: str = "job.toml") -> str:
    """The manifests as YAML, for `kubectl apply -f -`.

    Raises:
        LaunchError: a key of [kubernetes] that cannot be right.
    """
    yaml = optional_module("yaml", "pyyaml", "Writing manifests", error=LaunchError)

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined]
        """Repeats what is the same in several places, and writes lists of words in a line."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_sequence(self, tag: str, sequence: Any, flow_style: Any = None) -> Any:
            in_line = all(isinstance(each, int | str) for each in sequence)
            return super().represent_sequence(tag, sequence, flow_style=in_line)

    documents = [
        yaml.dump(each, Dumper=Dumper, sort_keys=False, width=100) for each in manifests(job, where)
    ]
    return "".join(f"# {line}\n" for line in _notes(job)) + "---\n".join(documents)


def manifests(job: Job, where: str = "job.toml") -> list[Manifest]:
    """What is to be created, in this order.

    Raises:
        LaunchError: a key of [kubernetes] that cannot be right.
    """
    counts = tasks_of(
        workers=job.nodes * job.workers_per_node,
        chief=job.chief,
        ps=job.ps,
        evaluator=job.evaluator,
        data_workers=0,
    )
    build = _Build(job, counts, _settings(job, counts, where))
    _check_names(job.name, build, where)
    if build.is_jobset:
        return [build.network_policy("jobset.sigs.k8s.io/jobset-name"), build.jobset()]
    label = "batch.kubernetes.io/job-name"
    return [build.network_policy(label), build.service(label), build.job()]


@dataclass(frozen=True)
class _Build:
    """Makes the manifests of one job.

    Attributes:
        job_file: what job.toml says.
        counts: role -> tasks.
        settings: the keys of [kubernetes], the usual ones added.
    """

    job_file: Job
    counts: Mapping[str, int]
    settings: Mapping[str, Any]

    @property
    def is_jobset(self) -> bool:
        return set(self.counts) != {"worker"}

    @property
    def leads(self) -> str:
        """The role of the tasks with which the job is done, or fails."""
        return "chief" if "chief" in self.counts else "worker"

    def network_policy(self, label: str) -> Manifest:
        """TensorFlow's servers authenticate nobody: only pods of this job may connect to them."""
        pods = {"podSelector": {"matchLabels": {label: self.job_file.name}}}
        spec = {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
        return self._manifest("networking.k8s.io/v1", "NetworkPolicy", spec)

    def service(self, label: str) -> Manifest:
        """In which the pods of a Job find each other, before they are ready; a JobSet has one."""
        selector = {label: self.job_file.name}
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        return self._manifest("v1", "Service", spec)

    def job(self) -> Manifest:
        """Where one worker fails all start again, and so it counts once for each index."""
        return self._manifest("batch/v1", "Job", self._job_spec("worker", self._each_index))

    def jobset(self) -> Manifest:
        job = self.job_file
        # The evaluator may still have the last checkpoint to evaluate.
        done = [role for role in (self.leads, "evaluator") if role in self.counts]
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": done},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "rules": [
                    {
                        "name": "permanent_failure",
                        "action": "FailJobSet",
                        "onJobFailureReasons": _FOR_GOOD,
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": role,
                    "replicas": 1,
                    "template": {
                        "spec": self._job_spec(
                            role, {"backoffLimit": 0} if role == self.leads else self._each_index
                        )
                    },
                }
                for role in self.counts
            ],
        }
        return self._manifest("jobset.x-k8s.io/v1alpha2", "JobSet", spec)

    @property
    def _each_index(self) -> Manifest:
        return {"backoffLimitPerIndex": self.job_file.max_restarts, "maxFailedIndexes": 0}

    def _manifest(self, version: str, kind: str, spec: Manifest) -> Manifest:
        metadata = {"name": self.job_file.name}
        if "namespace" in self.settings:
            metadata["namespace"] = self.settings["namespace"]
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _job_spec(self, role: str, limits: Manifest) -> Manifest:
        leads = role == self.leads
        tasks = {"completions": self.counts[role], "parallelism": self.counts[role]}
        spec: Manifest = {"completionMode": "Indexed", **tasks, **limits}
        if "active_deadline_seconds" in self.settings:
            spec["activeDeadlineSeconds"] = self.settings["active_deadline_seconds"]
        if leads and role == "worker":
            # The first worker ends with the others. One that dies after it has nothing to do.
            spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
        not_counted = [PREEMPTED] if leads else [RESTART, PREEMPTED]
        disrupted = [{"type": "DisruptionTarget", "status": "True"}]
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": disrupted},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": not_counted}},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _PERMANENT}},
            ]
        }
        spec["template"] = {"spec": self._pod(role)}
        return spec

    def _pod(self, role: str) -> Manifest:
        settings, user = self.settings, self.settings["user"]
        spec: Manifest = {} if self.is_jobset else {"subdomain": self.job_file.name}
        spec |= {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.job_file.grace + _MARGIN,
            # The first process of a container ignores SIGTERM, unless it handles it.
            "shareProcessNamespace": True,
            "automountServiceAccountToken": False,
        }
        if "service_account" in settings:
            spec["serviceAccountName"] = settings["service_account"]
        if settings["node_selector"]:
            spec["nodeSelector"] = settings["node_selector"]
        spec["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        spec["containers"] = [self._container(role)]
        if "volume" in settings:
            claim = {"claimName": settings["volume"]["claim"]}
            spec["volumes"] = [{"name": "checkpoints", "persistentVolumeClaim": claim}]
        return spec

    def _container(self, role: str) -> Manifest:
        job, settings = self.job_file, self.settings
        env = {"PYTHONUNBUFFERED": "1", GRACE: str(job.grace)}
        if job.max_restarts:
            env[STARTS_AGAIN] = "1"
        if self.is_jobset:
            tasks = ",".join(f"{each}={count}" for each, count in self.counts.items())
            env["TFDIST_JOBSET_TASKS"] = tasks
        else:
            env |= {"TFDIST_JOB_SIZE": str(self.counts["worker"]), "TFDIST_JOB_SERVICE": job.name}
        env |= {name: _literal(value) for name, value in job.env.items()}
        container: Manifest = {
            "name": "train",
            "image": settings["image"],
            "command": [_literal(word) for word in job.command],
            "env": [{"name": name, "value": value} for name, value in env.items()],
        }
        if resources := self._resources(role):
            container["resources"] = resources
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        if "volume" in settings:
            path = settings["volume"].get("path", "/checkpoints")
            container["volumeMounts"] = [{"name": "checkpoints", "mountPath": path}]
        return container

    def _resources(self, role: str) -> Manifest:
        wanted = _resources_of(role, self.settings)
        gpus = wanted.pop("gpus", self._gpus_of(role))
        # No limit of CPUs: it would slow a pod down, and others nothing.
        limits: Manifest = {"memory": wanted["memory"]} if "memory" in wanted else {}
        if gpus:
            limits[self.settings["gpu_resource"]] = gpus
        parts = {"requests": wanted, "limits": limits}
        return {name: part for name, part in parts.items() if part}

    def _gpus_of(self, role: str) -> int:
        """Of a pod. Beside parameter servers the chief computes nothing."""
        trains = role == "worker" or (role == "chief" and "ps" not in self.counts)
        return self.job_file.gpus_per_node // self.job_file.workers_per_node if trains else 0


def _resources_of(role: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The resources that a role asks for: its own before those of all."""
    common = {key: settings[key] for key in ("cpu", "memory") if key in settings}
    return {**common, **settings.get(role, {})}


def _settings(job: Job, counts: Mapping[str, int], where: str) -> dict[str, Any]:
    at = f"{where}: kubernetes"
    table = check_table(at, job.scheduler.get("kubernetes", {}), _KEYS)
    if not table.get("image"):
        raise LaunchError(
            f"{at}: image must be what each pod runs, got none; write image ="
            ' "registry.example.com/train:1"'
        )
    tables = {"volume": _OF_VOLUME, **dict.fromkeys(_ROLES, _OF_ROLE)}
    for key, keys in tables.items():
        if key in table:
            table[key] = check_table(f"{at}.{key}", table[key], keys)
    for role in _ROLES:
        if role in table and role not in counts:
            raise LaunchError(
                f"{at}.{role} must be of a role of this job, got none of {', '.join(counts)};"
                f" leave it out, or add a {role}"
            )
        for name in ("cpu", "memory"):
            value = _resources_of(role, table).get(name)
            if value is not None and not _QUANTITY.fullmatch(value):
                raise LaunchError(
                    f'{at}: {name} must be a quantity, got {shown(value)}; write "4", "500m" or'
                    ' "16Gi"'
                )
    volume = table.get("volume")
    if volume is not None and not volume.get("claim"):
        raise LaunchError(f"{at}.volume: claim must name a PersistentVolumeClaim, got none; add it")
    if volume is not None and not volume.get("path", "/").startswith("/"):
        raise LaunchError(
            f"{at}.volume: path must be absolute, got {shown(volume['path'])}; begin it with /"
        )
    for key, value in table.get("node_selector", {}).items():
        if not isinstance(value, str):
            raise LaunchError(
                f"{at}.node_selector: {key} must be text, got {shown(value)}; quote it"
            )
    if job.gpus_per_node % job.workers_per_node and "gpus" not in table.get("worker", {}):
        raise LaunchError(
            f"{where}: gpus_per_node must be a multiple of workers_per_node, as a pod is a worker,"
            f" got {job.gpus_per_node} for {job.workers_per_node}; change one of them, or say"
            " kubernetes.worker.gpus"
        )
    return {**_USUAL, **table}


def _check_names(name: str, build: _Build, where: str) -> None:
    """Kubernetes adds five characters of its own to the name of a pod."""
    parts = {role: f"-{role}-0" if build.is_jobset else "" for role in build.counts}
    longest = max(
        len(f"{name}{part}-{build.counts[role] - 1}-abcde") for role, part in parts.items()
    )
    if longest > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: name must begin with a letter, and be of at most"
            f" {len(name) - max(0, longest - _LONGEST_NAME)} characters on Kubernetes, got"
            f" {shown(name)}; change it"
        )


def _literal(text: str) -> str:
    """Kubernetes would replace $(NAME) in commands and values."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _notes(job: Job) -> list[str]:
    if job.min_workers is None:
        return []
    return [f"min_workers = {job.min_workers} is not for Kubernetes, where all pods are waited for"]
