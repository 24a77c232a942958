"""How ps and worker tasks of a parameter-server cluster serve, and end with their coordinator.

TensorFlow's servers never end by themselves. A server ends when the coordinator has sent its
result, or is gone or frozen. The coordinator ends the job when one of its servers is frozen.
"""

from __future__ import annotations

import time
from typing import NoReturn

import tensorflow as tf

from tfdist_ext.cluster.liveness.reports import say, show_stacks
from tfdist_ext.cluster.liveness.sessions import DONE, FAILED, STALLED
from tfdist_ext.cluster.liveness.watching import (
    ALIVE,
    EXPECTED,
    GONE,
    TaskWatch,
    exit_within,
)
from tfdist_ext.cluster.liveness.wire import Endpoint
from tfdist_ext.launch.exit_codes import RESTART
from tfdist_ext.strategies.cluster_start import run_preflight, start_failures_in_words
from tfdist_ext.strategies.resolvers import Cluster, Described, describe, resolver_of

_SESSION = 5.0  # seconds for the coordinator to open its session
_LOOK_EVERY = 0.5  # seconds
_START = 120.0  # seconds for the coordinator, which was in the preflight, to start its server
_LEAVE = 5.0  # seconds for the coordinator to be gone after its result
# Seconds without an answer after which the coordinator is frozen. It has less time to name a frozen
# server: SERVER_SILENT.
COORDINATOR_SILENT = 55.0
_END = 10.0  # seconds for this process to end by itself when another one is frozen


class RoleEnded(SystemExit):
    """The end of a task that does not drive the training: status 0, or 138 after a crash."""


def serves(described: Described) -> bool:
    """Whether this task is a ps, or a worker beside a ps: it serves a coordinator."""
    task = described.task
    return task is not None and task.type in ("ps", "worker") and "ps" in described.jobs


def driver_of(described: Described) -> tuple[str, str] | None:
    """Name and address of the task that leads the training: the chief, or worker 0 without one.

    None where that is no task of the cluster: parameter servers may have a coordinator that is
    named nowhere.
    """
    for job in ("chief",) if "ps" in described.jobs else ("chief", "worker"):
        if described.jobs.get(job, ("",))[0]:
            return f"{job}:0", described.jobs[job][0]
    return None


def serve(cluster: Cluster, wait: float | None = None) -> NoReturn:
    """Serve as this task of a cluster with parameter servers until the coordinator has ended.

    Signals end it at once.

    Args:
        wait: seconds to wait for the other tasks; None: 300.

    Raises:
        RoleEnded: always: with 0 when the coordinator has ended well, else with 138.
        StrategyError: this task cannot listen at its address, or another task does not come in
            time.
    """
    described = describe(cluster)
    assert described is not None
    assert described.task is not None
    resolver = resolver_of(cluster)
    endpoint = run_preflight(described, wait)
    if endpoint is not None:
        endpoint.free_port(session_within=_SESSION)
    try:
        with start_failures_in_words(described):
            # Not join(): it never returns, and it keeps Python from handling signals.
            server = tf.distribute.Server(
                resolver.cluster_spec(),
                job_name=described.task.type,
                task_index=described.task.index,
                protocol=resolver.rpc_layer or "grpc",
            )
        assert endpoint is not None  # else the port was in use, and the server has failed
        result = _result_of_coordinator(described, endpoint)
        del server  # it serves as long as there is a reference
    finally:
        if endpoint is not None:
            endpoint.close()
    # Not a failure of this task: whoever starts tasks starts it again where the coordinator is.
    raise RoleEnded(0 if result == DONE else RESTART)


def _result_of_coordinator(described: Described, endpoint: Endpoint) -> str:
    """DONE, FAILED or STALLED; "" if the coordinator has crashed or is frozen."""
    me, driver = str(described.task), driver_of(described)
    if driver is None:
        say(
            f"{me}: serving at {described.address}. {described.source} names no chief: this server"
            " does not notice the end of a coordinator. End it yourself."
        )
        while True:
            time.sleep(_LOOK_EVERY)
    coordinator = TaskWatch(*driver, COORDINATOR_SILENT)
    say(f"{me}: serving at {described.address}; the coordinator is {coordinator}")
    deadline = time.monotonic() + _START
    while coordinator.state != GONE and not coordinator.failure:
        if coordinator.state == EXPECTED and time.monotonic() >= deadline:
            break
        result = str(endpoint.next_word(_LOOK_EVERY).get("result", ""))
        if result == STALLED:
            show_stacks()  # this task may know why
        if result:
            _wait_until_gone(coordinator)
            say(f"{me}: the coordinator, {coordinator}, {_WORDS[result]}")
            return result
        if endpoint.had_session and coordinator.state == EXPECTED:
            coordinator.state = ALIVE
        coordinator.look()
    if coordinator.failure:
        say(f"{me}: {coordinator.failure} It coordinates this job, which ends.")
        exit_within(_END)
    else:
        say(f"{me}: the coordinator, {coordinator}, is gone without a message: it crashed")
    return ""


_WORDS = {DONE: "is done", FAILED: "has failed", STALLED: "has failed"}


def _wait_until_gone(coordinator: TaskWatch) -> None:
    """Wait for the end of the coordinator, which may still use its servers."""
    deadline = time.monotonic() + _LEAVE
    while coordinator.look() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
