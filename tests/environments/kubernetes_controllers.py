"""What Kubernetes does with the ends of pods: its controllers of Job and JobSet, in short.

Pure. They read a manifest, are told how pods end, and say which pods there should be. After
kubernetes.io/docs/concepts/workloads/controllers/job and pkg/controllers of
github.com/kubernetes-sigs/jobset (v0.12.0).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Manifest = dict[str, Any]


class Pod(NamedTuple):
    """A pod that there should be.

    Attributes:
        job: the name of its Job.
        index: JOB_COMPLETION_INDEX.
        life: another number is another pod of that index.
    """

    job: str
    index: int
    life: tuple[int, int]

    @property
    def hostname(self) -> str:
        return f"{self.job}-{self.index}"


@dataclass
class JobController:
    """One indexed Job.

    Attributes:
        state: "", "Complete" or "Failed".
        reason: of its failure.
        counted: failures of each index that count.
    """

    name: str
    spec: Manifest
    start: int = 0  # of the JobSet
    state: str = ""
    reason: str = ""
    succeeded: set[int] = field(default_factory=set)
    counted: Counter[int] = field(default_factory=Counter)
    lives: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        assert self.spec["completionMode"] == "Indexed"
        assert self.spec["parallelism"] == self.spec["completions"]
        assert self.spec["template"]["spec"]["restartPolicy"] == "Never"

    @property
    def wanted(self) -> list[Pod]:
        if self.state:
            return []
        indexes = (i for i in range(self.spec["completions"]) if i not in self.succeeded)
        return [Pod(self.name, i, (self.start, self.lives[i])) for i in indexes]

    def spec_of(self, pod: Pod) -> Manifest:
        return self.spec["template"]["spec"]

    def ended(self, pod: Pod, status: int, disrupted: bool = False) -> None:
        """A pod has ended; one that is not wanted any more does not count."""
        if pod not in self.wanted:
            return
        if status == 0:
            self.succeeded.add(pod.index)
            rules = self.spec.get("successPolicy", {"rules": []})["rules"]
            enough = [{int(rule["succeededIndexes"])} for rule in rules]
            everyone = set(range(self.spec["completions"]))
            if any(some <= self.succeeded for some in [*enough, everyone]):
                self.state = "Complete"
            return
        self.lives[pod.index] += 1
        match self._action(status, disrupted):
            case "FailJob":
                self._fail("PodFailurePolicy")
            case "Count":
                self.counted[pod.index] += 1
                per_index = self.spec.get("backoffLimitPerIndex")
                if per_index is not None and self.counted[pod.index] > per_index:
                    assert self.spec["maxFailedIndexes"] == 0
                    self._fail("MaxFailedIndexesExceeded")
                if per_index is None and self.counted.total() > self.spec["backoffLimit"]:
                    self._fail("BackoffLimitExceeded")

    def _fail(self, reason: str) -> None:
        self.state, self.reason = "Failed", reason

    def _action(self, status: int, disrupted: bool) -> str:
        for rule in self.spec["podFailurePolicy"]["rules"]:
            for condition in rule.get("onPodConditions", ()):
                assert condition == {"type": "DisruptionTarget", "status": "True"}
                if disrupted:
                    return str(rule["action"])
            codes = rule.get("onExitCodes")
            if codes and (status in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
        return "Count"


@dataclass
class JobSetController:
    """A JobSet.

    Attributes:
        state: "", "Completed" or "Failed".
        restarts: how often all of its Jobs were made anew.
    """

    name: str
    spec: Manifest
    state: str = ""
    reason: str = ""
    restarts: int = 0
    jobs: dict[str, JobController] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._make_jobs()

    def _make_jobs(self) -> None:
        self.jobs = {
            each["name"]: JobController(
                f"{self.name}-{each['name']}-0", each["template"]["spec"], self.restarts
            )
            for each in self.spec["replicatedJobs"]
        }
        assert all(each["replicas"] == 1 for each in self.spec["replicatedJobs"])

    @property
    def wanted(self) -> list[Pod]:
        return [] if self.state else [pod for job in self.jobs.values() for pod in job.wanted]

    def spec_of(self, pod: Pod) -> Manifest:
        return next(job for job in self.jobs.values() if job.name == pod.job).spec_of(pod)

    def ended(self, pod: Pod, status: int, disrupted: bool = False) -> None:
        for job in self.jobs.values():
            if job.name == pod.job:
                job.ended(pod, status, disrupted)
        failed = [job for job in self.jobs.values() if job.state == "Failed"]
        if failed:
            self._failed(failed)
            return
        policy = self.spec["successPolicy"]
        assert policy["operator"] == "All"
        targets = [self.jobs[name] for name in policy["targetReplicatedJobs"]]
        if all(job.state == "Complete" for job in targets):
            self.state = "Completed"

    def _failed(self, failed: list[JobController]) -> None:
        policy = self.spec["failurePolicy"]
        for rule in policy["rules"]:
            assert rule["action"] == "FailJobSet"
            if reasons := {job.reason for job in failed} & set(rule["onJobFailureReasons"]):
                self.state, self.reason = "Failed", reasons.pop()
                return
        if self.restarts >= policy["maxRestarts"]:
            self.state, self.reason = "Failed", "ReachedMaxRestarts"
            return
        self.restarts += 1
        self._make_jobs()
