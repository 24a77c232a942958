"""The addresses, jobs and tasks of a cluster: every rule of validity is here, and only here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from tfdist_ext.messages import counted, nearest, refuse
from tfdist_ext.user_frames import filter_traceback

JOB_NAMES = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = 'Give at least one job, for example {"worker": ["host:port"]}.'
# The common case in one match. Ports have no leading zeros, so one address has one spelling.
_PLAIN = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*):([1-9][0-9]{0,4})")
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_DOTTED = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_ADDRESS_EXAMPLE = 'Write "host:port", for example "10.0.0.5:2222".'
_MAX_PORT = 65535


class AddressError(ValueError):
    """An address that cannot be dialed.

    Args:
        what: the end of a sentence that begins with the name of the address.
        advice: what to write instead.
    """

    def __init__(self, what: str, advice: str = _ADDRESS_EXAMPLE) -> None:
        super().__init__(what, advice)


def identity(address: object) -> tuple[str, int]:
    """The host in one canonical spelling, and the port: equal for two spellings of one address.

    Raises:
        AddressError: the address is not "host:port", or one of both is invalid.
    """
    if not isinstance(address, str):
        raise AddressError("is not a string")
    match = _PLAIN.fullmatch(address)
    if match is None or int(match[2]) > _MAX_PORT:
        return _identity_of_unusual(address)
    host = match[1].lower().rstrip(".")
    if _DOTTED.fullmatch(host):
        _ip(ipaddress.IPv4Address, host)
    return host, int(match[2])


def _identity_of_unusual(address: str) -> tuple[str, int]:
    if not address.strip():
        raise AddressError("is blank")
    if any(character.isspace() for character in address):
        raise AddressError("has white space in it", "Remove the white space.")
    if "://" in address:
        raise AddressError("has a scheme", 'Remove everything before the host, including "://".')
    if address.startswith("["):
        match = _BRACKETED.fullmatch(address)
        if match is None:
            raise AddressError(
                "has brackets that do not match", 'Write IPv6 as "[2001:db8::1]:2222".'
            )
        host = _ip(ipaddress.IPv6Address, match[1])
        return f"[{host}]", _port(match[2])
    if address.count(":") > 1:
        raise AddressError(
            "has more than one colon", 'Put an IPv6 host in brackets: "[2001:db8::1]:2222".'
        )
    host, colon, port = address.partition(":")
    if not colon:
        raise AddressError("has no port")
    if not host:
        raise AddressError("has no host")
    _port(port)
    raise AddressError(
        "has a host name with invalid characters",
        "Use letters, digits, dots and hyphens.",
    )


def _ip(kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address], host: str) -> str:
    try:
        return str(kind(host))
    except ValueError:
        version = "IPv6" if kind is ipaddress.IPv6Address else "IPv4"
        raise AddressError(f"is not a valid {version} address") from None


def _port(text: str | None) -> int:
    if not text:
        raise AddressError("has no port")
    if not _PORT.fullmatch(text) or int(text) > _MAX_PORT:
        raise AddressError("has an invalid port", "Use a port from 1 to 65535.")
    return int(text)


@filter_traceback
@dataclass(frozen=True)
class Task:
    """A task (process) of a cluster.

    Attributes:
        type: the job of the task: "chief", "worker", "ps" or "evaluator".
        index: the index of the task in its job, starting at 0.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class Jobs(dict[str, tuple[str, ...]]):
    """Job name -> addresses in index order; checked and read-only.

    It copies what it is given. Jobs stand in the order chief, worker, ps, evaluator.

    Raises:
        ClusterConfigError: no jobs, an unknown or empty job, two chiefs, ps without workers, or an
            address that is wrong or stands twice.
    """

    def __init__(self, jobs: Mapping[str, Sequence[str]], where: str = "ClusterConfig") -> None:
        if not isinstance(jobs, Mapping):
            raise refuse(where, "cluster must map job names to addresses", jobs, _EXAMPLE)
        if not jobs:
            raise refuse(where, "cluster is empty", jobs, _EXAMPLE)
        for name in jobs:
            check_job_name(name, "cluster", where)
        super().__init__(
            (name, _addresses(name, jobs[name], where)) for name in JOB_NAMES if name in jobs
        )
        if len(self.get("chief", ())) > 1:
            advice = "A cluster has one chief: move the other addresses to worker."
            raise refuse(where, "cluster.chief must have one address", self["chief"], advice)
        if "ps" in self and "worker" not in self:
            advice = "Add a worker job, or remove ps."
            raise refuse(where, "cluster.ps needs workers", dict(self), advice)
        _check_addresses(self, where)

    def __hash__(self) -> int:  # type: ignore[override]  # a plain dict can change, this cannot
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Jobs, (dict(self),)

    def _read_only(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the jobs of a ClusterConfig are read-only: make a new ClusterConfig")

    __setitem__ = __delitem__ = __ior__ = _read_only
    clear = pop = popitem = setdefault = update = _read_only


class ClusterDescription(NamedTuple):
    """A cluster as an environment or a resolver describes it; `ClusterConfig` checks it.

    Attributes:
        jobs: job -> addresses in index order; empty: no cluster.
        task: the task of this process; None if a resolver does not know it.
        source: the origin of the description, in a few words.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task: Task | None
    source: str

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates, and takes no part in the training."""
        return self.task is not None and self.task.type == "evaluator"

    @property
    def serves(self) -> bool:
        """Whether this task is a ps, or a worker beside a ps: it serves a coordinator."""
        return self.task is not None and self.task.type in ("ps", "worker") and "ps" in self.jobs

    @property
    def driver(self) -> tuple[str, str] | None:
        """Name and address of the task that leads the training: the chief, or worker 0 without one.

        None if it is not a task of the cluster, as the coordinator of parameter servers may be.
        """
        for job in ("chief",) if "ps" in self.jobs else ("chief", "worker"):
            if job in self.jobs:
                return f"{job}:0", self.jobs[job][0]
        return None

    def __str__(self) -> str:
        return ", ".join(counted(len(tasks), job) for job, tasks in self.jobs.items())


def addresses_of(jobs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Task -> address of the tasks that start together, the leader first; no evaluator."""
    return {
        f"{job}:{index}": address
        for job in ("chief", "worker", "ps")
        for index, address in enumerate(jobs.get(job, ()))
    }


def check_job_name(name: object, key: str, where: str) -> None:
    """Refuses a job name that TensorFlow has no role for; `key` names the field for the message."""
    if name in JOB_NAMES:
        return
    old = 'Use "chief", its new name.'
    advice = old if name == "master" else nearest(name, JOB_NAMES)
    verb = "has a job" if key == "cluster" else "is a job"
    raise refuse(where, f"{key} {verb} that TensorFlow does not know", name, advice)


def check_task(task: object, jobs: Jobs, where: str) -> None:
    """Refuses a task that is not one of the tasks of these jobs."""
    if not isinstance(task, Task):
        raise refuse(where, "task must be a Task", task, 'Write Task("worker", 0).')
    check_job_name(task.type, "task.type", where)
    index = task.index
    if isinstance(index, bool) or not isinstance(index, int):
        raise refuse(where, "task.index must be a whole number", index, "Give 0, 1, 2, ...")
    if task.type == "evaluator" and task.type not in jobs and index >= 0:
        return  # it is outside of the cluster, as TensorFlow allows
    if task.type not in jobs:
        what = f"task.type is {task.type}, but cluster has no such job"
        advice = f"Add the {task.type} job with the address of each of its tasks to cluster."
        raise refuse(where, what, list(jobs), advice)
    if not 0 <= index < len(jobs[task.type]):
        what = f"task.index must be from 0 to {len(jobs[task.type]) - 1}"
        advice = f"Correct it, or add the address of this task to cluster.{task.type}."
        raise refuse(where, what, index, advice)


def _addresses(name: str, value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        advice = f'Write "{name}": ["host:port"], or remove {name}.'
        raise refuse(where, f"cluster.{name} must be a list of addresses", value, advice)
    return tuple(value)


def _check_addresses(jobs: Jobs, where: str) -> None:
    first: dict[tuple[str, int], str] = {}
    for name, addresses in jobs.items():
        for index, address in enumerate(addresses):
            path = f"cluster.{name}[{index}]"
            try:
                key = identity(address)
            except AddressError as error:
                what, advice = error.args
                raise refuse(where, f"{path} {what}", address, advice) from None
            if (taken := first.setdefault(key, path)) != path:
                advice = "Give each task a different host or port."
                raise refuse(where, f"{path} has the same address as {taken}", address, advice)
