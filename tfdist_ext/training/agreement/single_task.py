"""The only task of a training: it waits for no other task, and has nothing to reduce.

With several workers, `PeerMonitor` and `SynchronousReduction` extend these classes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdist_ext.training.agreement.stalls import Phases
from tfdist_ext.training.agreement.termination import Termination


class TaskStatus:
    """What a task is doing, for its watchdog and for the other tasks.

    Args:
        phases: the phases that a watchdog watches; None if there is no watchdog.
    """

    def __init__(self, phases: Phases | None = None) -> None:
        self._phases = phases
        self._termination: Termination | None = None  # of a training that saves

    def call(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Scope of a public call."""
        return contextlib.nullcontext() if self._phases is None else self._phases.of_call()

    def barrier(self, detail: str = "") -> contextlib.AbstractContextManager[None]:
        """Scope in which this task waits for the others."""
        return contextlib.nullcontext()

    def reached(self, place: str) -> None:
        """Records the last step that is done, as "step 120", for messages."""

    def enters(self, phase: str) -> None:
        """Begins a phase: "compiling", "steps", "callbacks" or "checkpoint"."""
        if self._phases is not None:
            self._phases.enter(phase)

    def reads_batches(self, count: Callable[[], int]) -> None:
        """Sets the function that counts the batches the running execution has read."""

    @property
    def told_to_end(self) -> bool:
        """Whether SIGTERM has come, in the scope of `ends_at_a_step`."""
        termination = self._termination
        return termination is not None and termination.only_noted and bool(termination.received)

    @contextlib.contextmanager
    def ends_at_a_step(self) -> Iterator[None]:
        """Scope of a training that ends at a step of all tasks after a task got SIGTERM."""
        with contextlib.closing(Termination()) as termination, termination.noted():
            self._termination = termination
            try:
                yield
            finally:
                self._termination = None


class Reduction:
    """Reduces values of replicas and tasks to one value for all.

    Attributes:
        replicas: number of parts of a global batch, over all workers.
        local_replicas: number of replicas of this worker.
        first_replica: the index of this worker's first replica, over all workers.
        workers: number of workers.
        worker: the index of this worker.
        multi_worker: whether there are several workers.
        is_chief: whether this task writes files and prints.
        peers: the status of this task among the others.
    """

    replicas = local_replicas = workers = 1
    first_replica = worker = 0
    multi_worker = False
    is_chief = True

    def __init__(self, strategy: tf.distribute.Strategy, peers: TaskStatus) -> None:
        self.strategy = strategy
        self.peers = peers

    def call(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Scope of a public call; all workers wait until each has made it."""
        return self.peers.call(name)

    def task_names(self) -> list[str]:
        """The tasks that compute, in the order of their replicas, as "worker 1"."""
        return ["the chief"]

    def sum_over_workers(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The sum over workers of each worker's number or array; every worker must call."""
        return np.asarray(value)

    def from_chief(self, value: npt.ArrayLike) -> npt.NDArray[Any]:
        """The chief's number or array, on every worker; every worker must call."""
        value = np.asarray(value)
        return self.sum_over_workers(value if self.is_chief else np.zeros_like(value))

    def any_worker(self, flag: bool) -> bool:
        """Whether the flag is set on any worker; every worker must call."""
        return bool(self.sum_over_workers(np.int32(flag)) > 0)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def on_every_worker(method: _Method) -> _Method:
    """Decorator of a public method that every worker must call; a missing call is an error."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._reduction.call(method.__name__):
            return method(self, *args, **kwargs)

    return cast(_Method, called)
