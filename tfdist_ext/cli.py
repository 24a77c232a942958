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
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tfdist_ext import __version__
from tfdist_ext.errors import LaunchError, TfDistError
from tfdist_ext.launch import addresses_needed, plan_local, reserve_ports, run_plan, shell_line
from tfdist_ext.launch.command_line import COMMAND
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
    to_kill = "from SIGTERM to SIGKILL when tasks are ended (default 5)"
    seconds("--grace", default=5.0, help=to_kill)
    to_end = "with --ps: time for the others to end after the chief (default 5)"
    seconds("--linger", default=5.0, help=to_end)
    seconds("--timeout", help="end the run after this time (124)")
    run.add_argument(
        "--dry-run", action="store_true", help="print a line for the shell a task; start nothing"
    )


def _run(options: argparse.Namespace, command: list[str]) -> int:
    # The environment is read here, and handed down.
    env = dict(os.environ)
    env.setdefault(COMMAND, shlex.join(["tfdist", *sys.argv[1:]]))
    names = ("chief", "ps", "evaluator", "data_workers")
    tasks = {name: getattr(options, name) for name in names}
    shares = _shares(options, env) if options.process_per_device else []
    tasks["workers"] = len(shares) or (1 if options.workers is None else options.workers)
    with reserve_ports(addresses_needed(**tasks)) as ports:
        make_plan = functools.partial(
            plan_local, command, **tasks, shares=shares, ports=ports, env=env
        )
        plan = make_plan(log_dir=options.log_dir)
        if options.dry_run:
            for task in plan.tasks:
                print(shell_line(task))
            return 0
        # Logs are always written, and deleted where no one will read them.
        log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="tfdist-"))
        status = 0
        try:
            plan = make_plan(log_dir=log_dir)
            limits = {name: getattr(options, name) for name in ("grace", "linger", "timeout")}
            status = run_plan(plan, env=env, **limits).exit_status
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
