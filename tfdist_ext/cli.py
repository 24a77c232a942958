"""The command `tfdist`: a table of sub-commands.

TensorFlow is imported only by those that use it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tfdist_ext import __version__, check_command
from tfdist_ext.check_command import add_check_options, run_check_command
from tfdist_ext.env_command import add_env_options, run_env_command
from tfdist_ext.errors import LaunchError, TfDistError
from tfdist_ext.launch import LaunchPlan, addresses_needed, plan_local, reserve_ports, shell_line
from tfdist_ext.launch.command_line import COMMAND
from tfdist_ext.launch.exit_codes import (
    STALL_TIMEOUT,
    USUAL_STALL_TIMEOUT,
    RestartOn,
    stall_timeout,
)
from tfdist_ext.launch.restarting import Limits, run_with_restarts
from tfdist_ext.launch.restarts import RestartPolicy
from tfdist_ext.launch.shares import Share, gpus_of, shares_of
from tfdist_ext.plan_command import EPILOG, add_plan_options, run_plan_command

__all__ = ["main"]

_USAGE_ERROR = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Its errors are of the same kind as all others: one sentence, and what to do."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True)
class _Command:
    """A sub-command.

    Attributes:
        summary: the first line of its --help.
        epilog: the last lines of it.
        add_options: declares its options.
        run: gets the options and the words after `--`, and returns the exit status.
        usage: its words and options.
    """

    summary: str
    epilog: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], int]
    usage: str

    @property
    def takes_command(self) -> bool:
        return " -- " in self.usage


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tfdist`; the exit status is returned, also for --help and for errors (2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        return _dispatch(words)
    except TfDistError as error:
        print(f"tfdist: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:  # before anything was started; later it is an event of the run
        return _INTERRUPTED
    except SystemExit as exit:  # argparse ends --help and --version this way
        return int(exit.code or 0)
    finally:
        _give_up_closed_output()


def _dispatch(words: list[str]) -> int:
    dashes = "--" in words
    at = words.index("--") if dashes else len(words)
    before, command_line = words[:at], words[at + 1 :]
    parser = _parser()
    if not before:
        parser.print_help()
        return _USAGE_ERROR
    options, unknown = parser.parse_known_args(before)
    command = _COMMANDS[options.command]
    if unknown:
        _refuse_unknown(unknown, options.command, command, dashes)
    if dashes and not command.takes_command:
        raise LaunchError(
            f"tfdist {options.command} must come without a command, got words after --; leave them"
            " out"
        )
    return command.run(options, command_line)


def _refuse_unknown(unknown: list[str], name: str, command: _Command, dashes: bool) -> NoReturn:
    if command.takes_command and not dashes and not unknown[0].startswith("-"):
        raise LaunchError(
            f"the command to run must stand after --, got {unknown[0]!r} without it; write: tfdist"
            f" {name} [options] -- {' '.join(unknown)}"
        )
    raise LaunchError(f"unknown: {' '.join(unknown)}; see tfdist {name} --help")


def _parser() -> _Parser:
    parser = _Parser(
        prog="tfdist", description="Run one Keras script on a cluster.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tfdist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary + ".",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"tfdist {command.usage}",
            allow_abbrev=False,
        )
        command.add_options(sub)
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"seconds must be a number from 0, got {text!r}")
    return value


def _signal(text: str) -> signal.Signals:
    name = text if text.startswith("SIG") else f"SIG{text}"
    if name not in _ASK_TO_END:
        raise argparse.ArgumentTypeError(
            f"a signal must be one of {', '.join(_ASK_TO_END)}, got {text!r}"
        )
    return signal.Signals[name]


_ASK_TO_END = ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGXCPU"]


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("tasks")
    number = functools.partial(tasks.add_argument, type=int, metavar="N")
    number("--workers", help="workers (default 1)")
    tasks.add_argument(
        "--process-per-device",
        action="store_true",
        help="a worker for each GPU, which it alone sees; without GPUs, --workers that divide the"
        " cores among them",
    )
    tasks.add_argument(
        "--chief",
        action=argparse.BooleanOptionalAction,
        help="a chief beside the workers (default: only with --ps, which needs one)",
    )
    number("--ps", default=0, help="parameter servers")
    tasks.add_argument("--evaluator", action="store_true", help="an evaluator")
    number("--data-workers", default=0, help="workers of a tf.data service, and its dispatcher")
    run = parser.add_argument_group("run")
    seconds = functools.partial(run.add_argument, type=_seconds, metavar="SECONDS")
    run.add_argument("--log-dir", type=Path, metavar="DIR", help="keep a log file a task here")
    to_kill = "from SIGTERM to SIGKILL when a preemption ends the tasks (default 30; Ctrl-C: 5)"
    seconds("--grace", default=30.0, help=to_kill)
    run.add_argument(
        "--preemption-signal",
        type=_signal,
        default=signal.SIGTERM,
        metavar="SIGNAL",
        help="one that asks the training to save and end, beside SIGTERM (SIGUSR1 on Slurm)",
    )
    seconds(
        "--stall-timeout",
        help="end a task whose training makes no progress for this time (default 60; longer while"
        " it compiles, in callbacks, and where steps take long; 0: never)",
    )
    to_end = "with --ps: time for the others to end after the chief (default 5)"
    seconds("--linger", default=5.0, help=to_end)
    seconds("--timeout", help="end the run after this time (124)")
    again = parser.add_argument_group("restarts")
    again.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the cluster again when a task fails, so often (default 0);"
        " fit(checkpoint_dir=...) goes on from its newest checkpoint",
    )
    again.add_argument(
        "--min-workers",
        type=int,
        metavar="N",
        help="go on without a worker that fails again and again, with at least so many",
    )
    again.add_argument(
        "--restart-on",
        type=RestartOn.parse,
        default=RestartOn(),
        metavar="CODES",
        help="the ends that are worth it (default exception,128-255; 128 + n is signal n, and an"
        " exception in the same place as before is not)",
    )
    seconds = functools.partial(again.add_argument, type=_seconds, metavar="SECONDS")
    to_grow = "with fewer workers: try all again after this time, and twice as long each time"
    seconds("--grow-after", default=600.0, help=f"{to_grow} (default 600)")
    run.add_argument(
        "--dry-run", action="store_true", help="print a line for the shell a task; start nothing"
    )


def _run(options: argparse.Namespace, command: list[str]) -> int:
    # The environment is read here, and handed down.
    env = dict(os.environ)
    env.setdefault(COMMAND, shlex.join(["tfdist", *sys.argv[1:]]))
    if options.stall_timeout is not None:
        env[STALL_TIMEOUT] = f"{options.stall_timeout:g}"
    env.setdefault(STALL_TIMEOUT, f"{USUAL_STALL_TIMEOUT:g}")
    names = ("chief", "ps", "evaluator", "data_workers")
    tasks = {name: getattr(options, name) for name in names}
    shares = _shares(options, env) if options.process_per_device else []
    workers = len(shares) or (1 if options.workers is None else options.workers)

    @contextlib.contextmanager
    def planned(numbers: Sequence[int], log_dir: Path | None) -> Iterator[LaunchPlan]:
        tasks["workers"] = len(numbers)
        theirs = [shares[number] for number in numbers] if shares else []
        with reserve_ports(addresses_needed(**tasks)) as ports:
            yield plan_local(command, **tasks, shares=theirs, ports=ports, env=env, log_dir=log_dir)

    if options.dry_run:
        with planned(range(workers), options.log_dir) as plan:
            for task in plan.tasks:
                print(shell_line(task))
        return 0
    policy = RestartPolicy(
        options.max_restarts,
        workers,
        workers if options.min_workers is None else options.min_workers,
        options.restart_on,
        options.grow_after,
    )
    limits = Limits(
        options.grace,
        options.linger,
        options.timeout,
        stall_timeout(env),
        options.preemption_signal,
    )
    # Logs are always written, and deleted where no one will read them.
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="tfdist-"))
    status = 1
    try:
        status = run_with_restarts(planned, policy, log_dir=log_dir, env=env, limits=limits)
    finally:
        if options.log_dir is None and status == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
    if status:
        print(f"tfdist: logs: {log_dir}", file=sys.stderr)
    return status


def _shares(options: argparse.Namespace, env: Mapping[str, str]) -> list[Share]:
    if options.ps or options.chief or options.evaluator:
        raise LaunchError(
            "--process-per-device must come with workers alone, got --ps, --chief or --evaluator;"
            " leave one of them out"
        )
    bound = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = sorted(os.sched_getaffinity(0)) if bound else []
    return shares_of(options.workers, gpus=gpus_of(env), cores=cores)


_COMMANDS = {
    "run": _Command(
        summary="start a cluster on this machine, watch it, and end it",
        epilog="""\
Each task runs the command with its own TF_CONFIG. The first task that fails is the root cause:
the others are ended, and its exit status is that of tfdist. With --ps, the run is over when the
chief is. Ctrl-C ends everything.

example:
  tfdist run --workers 2 -- python train.py --epochs 3""",
        add_options=_add_run_options,
        run=_run,
        usage="run [options] -- command",
    ),
    "check": _Command(
        summary="is this task's cluster right, and are the other tasks there",
        epilog=check_command.EPILOG,
        add_options=functools.partial(add_check_options, seconds=_seconds),
        run=run_check_command,
        usage="check [options]",
    ),
    "env": _Command(
        summary="what this machine has, to paste into a bug report",
        epilog="",
        add_options=add_env_options,
        run=run_env_command,
        usage="env",
    ),
    "plan": _Command(
        summary="where each variable of a model would live on parameter servers",
        epilog=EPILOG,
        add_options=add_plan_options,
        run=run_plan_command,
        usage="plan module:builder [options]",
    ),
}


def _open_standard_streams() -> None:
    """Open what is closed (`tfdist ... >&-`) on /dev/null.

    Python has no stream there, and the next file or pipe that is opened would take its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _give_up_closed_output() -> None:
    """After `tfdist ... | head`: the interpreter would complain when it flushes at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
