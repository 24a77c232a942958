"""The command `tfdist`: a table of sub-commands.

TensorFlow is imported only by those that use it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

from tfdist_ext import __version__, check_command, env_command, plan_command, run_command
from tfdist_ext.errors import LaunchError, TfDistError

__all__ = ["main"]

_USAGE_ERROR = 2
_INTERRUPTED = 130
# Each has SUMMARY, USAGE, EPILOG, add_options(parser) and run(options, words after --).
_COMMANDS = {
    "run": run_command,
    "check": check_command,
    "env": env_command,
    "plan": plan_command,
}


class _Parser(argparse.ArgumentParser):
    """Its errors are of the same kind as all others: one sentence, and what to do."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            hint = _did_you_mean(found[1], re.findall(r"[\w-]+", found[2]))
        raise LaunchError(f"{message}; see {self.prog} --help{hint}")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f". Did you mean {close[0]}?" if close else ""


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
    if dashes and not _takes_command(command):
        raise LaunchError(
            f"tfdist {options.command} must come without a command, got words after --; leave them"
            " out"
        )
    return int(command.run(options, command_line))


def _takes_command(command: ModuleType) -> bool:
    return " -- " in command.USAGE


def _refuse_unknown(unknown: list[str], name: str, command: ModuleType, dashes: bool) -> NoReturn:
    if _takes_command(command) and not dashes and not unknown[0].startswith("-"):
        raise LaunchError(
            f"the command to run must stand after --, got {unknown[0]!r} without it; write: tfdist"
            f" {name} [options] -- {' '.join(unknown)}"
        )
    parser = _Parser()
    command.add_options(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    hint = _did_you_mean(unknown[0].partition("=")[0], options)
    raise LaunchError(f"unknown: {' '.join(unknown)}; see tfdist {name} --help{hint}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="tfdist", description="Run one Keras script on a cluster.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tfdist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.SUMMARY + ".",
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"tfdist {command.USAGE}",
            allow_abbrev=False,
        )
        command.add_options(sub)
    return parser


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
