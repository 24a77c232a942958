"""tfdist run: a cluster on this machine, watched to its end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist_ext.errors import LaunchError
from tfdist_ext.launcher.exit_codes import COMMAND, STALL_TIMEOUT, USUAL_STALL_TIMEOUT, StopSignals
from tfdist_ext.launcher.plan import LaunchPlan, local_plan, shell_line
from tfdist_ext.launcher.resources import gpus_of, watch_ports
from tfdist_ext.launcher.restarts import RestartPolicy, run_with_restarts
from tfdist_ext.launcher.run import Limits
from tfdist_ext.messages import check_int

SUMMARY = "start a cluster on this machine, watch it, and end it"
USAGE = "run [options] -- command"

EPILOG = """\
Each task runs the command with its own TF_CONFIG. The first task that fails is the root cause:
tfdist ends the other tasks and exits with the status of the failed task. With --ps, the run ends
when the chief ends. Ctrl-C ends everything.

example:
  tfdist run --workers 2 -- python train.py --epochs 3"""


def seconds_of(text: str) -> float:
    """The number of seconds that an option's text gives.

    Raises:
        argparse.ArgumentTypeError: the text is not a number from 0.
    """
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 1e9:
            return value
    raise argparse.ArgumentTypeError(f"seconds must be a number from 0, got {text!r}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist run`."""
    tasks = parser.add_argument_group("tasks")
    number = functools.partial(tasks.add_argument, type=int, metavar="N")
    switch = functools.partial(tasks.add_argument, action="store_true")
    number("--workers", help="number of workers (default 1)")
    switch("--process-per-device", help="one worker per GPU; each worker sees only its own GPU")
    chief = "a chief in addition to the workers (default: only with --ps, which needs a chief)"
    tasks.add_argument("--chief", action=argparse.BooleanOptionalAction, help=chief)
    number("--ps", default=0, help="number of parameter servers")
    switch("--evaluator", help="an evaluator, which evaluates each new checkpoint")
    run = parser.add_argument_group("run")
    seconds = functools.partial(run.add_argument, type=seconds_of, metavar="SECONDS")
    run.add_argument("--log-dir", type=Path, metavar="DIR", help="write one log file per task here")
    to_kill = "time from SIGTERM to SIGKILL in a preemption (default 30; at most 5 for Ctrl-C)"
    seconds("--grace", default=30.0, help=to_kill)
    run.add_argument(
        "--preemption-signal",
        choices=["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGXCPU"],
        default="SIGTERM",
        metavar="SIGNAL",
        help="another signal that asks the training to save and end (SIGUSR1 on Slurm)",
    )
    seconds(
        "--stall-timeout",
        help="end a task whose training makes no progress for this time (default 60; longer during"
        " compilation, in callbacks and for slow steps; 0: never)",
    )
    to_end = "with --ps: time for the other tasks to end after the chief (default 5)"
    seconds("--linger", help=to_end)
    seconds("--timeout", help="end the run after this time, with exit status 124")
    run.add_argument(
        "--dry-run", action="store_true", help="print one shell command per task and start nothing"
    )
    restarts = parser.add_argument_group("restarts")
    number = functools.partial(restarts.add_argument, type=int, metavar="N")
    number(
        "--max-restarts",
        default=0,
        help="restart the cluster up to N times after a failure (default 0);"
        " fit(checkpoint_dir=...) resumes from its newest checkpoint",
    )
    number("--min-workers", help="leave out a worker that fails repeatedly, but keep at least N")


def run(options: argparse.Namespace, command: list[str]) -> int:
    """Run the cluster; returns the exit status of the run."""
    env = _env_of_tasks(options)
    gpus = _gpus(options, env) if options.process_per_device else []
    workers = len(gpus) or (1 if options.workers is None else options.workers)
    policy = RestartPolicy(
        options.max_restarts,
        workers,
        workers if options.min_workers is None else options.min_workers,
    )
    if options.linger is not None and not options.ps:
        raise LaunchError("--linger needs --ps. Add --ps N, or remove --linger.")
    linger = Limits.linger if options.linger is None else options.linger
    limits = Limits(options.grace, linger, options.timeout)
    joined = threading.Event()  # set when a task listens at its address

    @contextlib.contextmanager
    def planned(workers: Sequence[int], log_dir: Path | None) -> Iterator[LaunchPlan]:
        """The plan of one start of these workers."""
        with (
            local_plan(
                command,
                workers=len(workers),
                chief=options.chief,
                ps=options.ps,
                evaluator=options.evaluator,
                gpus=[gpus[number] for number in workers if gpus],
                env=env,
                log_dir=log_dir,
            ) as plan,
            watch_ports(plan.ports, joined),
        ):
            yield dataclasses.replace(plan, shows_ids=len(plan.tasks) > 1)

    if options.dry_run:
        with planned(range(workers), options.log_dir) as plan:
            for task in plan.tasks:
                print(shell_line(task))
        return 0
    # Logs are always written. Without --log-dir, they are deleted after a success.
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="tfdist-"))
    status = 1
    try:
        stop = StopSignals(signal.Signals[options.preemption_signal])
        ended = run_with_restarts(planned, policy, log_dir, env, limits, stop)
        status = ended.exit_status
    finally:
        if options.log_dir is None and (status == 0 or not any(log_dir.iterdir())):
            shutil.rmtree(log_dir, ignore_errors=True)
    if status:
        _say(f"logs: {log_dir}")
    elif not joined.is_set() and workers + options.ps + bool(options.chief) > 1:
        _say(
            "no task joined the cluster: each task ran alone, and may have trained its own model."
            " Call tfd.create_strategy() in the script."
        )
    return status


def _env_of_tasks(options: argparse.Namespace) -> dict[str, str]:
    """The environment that tasks start with: read here, and passed down."""
    env = dict(os.environ)
    env.setdefault(COMMAND, shlex.join(["tfdist", *sys.argv[1:]]))
    if options.stall_timeout is not None:
        env[STALL_TIMEOUT] = f"{options.stall_timeout:g}"
    env.setdefault(STALL_TIMEOUT, f"{USUAL_STALL_TIMEOUT:g}")
    if env.get("TF_CONFIG", "").strip():
        _say(
            "TF_CONFIG is set, and is not used: each task gets the TF_CONFIG of a new cluster on"
            " this machine. To join the cluster of TF_CONFIG, run the command without tfdist run."
        )
    return env


def _say(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr)


def _gpus(options: argparse.Namespace, env: Mapping[str, str]) -> list[str]:
    """The GPU of each worker."""
    if options.ps or options.chief or options.evaluator:
        raise LaunchError(
            "--process-per-device starts workers only. Remove it, or remove --ps, --chief and"
            " --evaluator."
        )
    gpus = gpus_of(env)
    if not gpus:
        raise LaunchError(
            "--process-per-device needs GPUs, and this machine has none. Use --workers N, which"
            " divides the CPU cores among the workers."
        )
    count = len(gpus) if options.workers is None else options.workers
    check_int(count, "--workers with --process-per-device", 1, len(gpus), error=LaunchError)
    return gpus[:count]
