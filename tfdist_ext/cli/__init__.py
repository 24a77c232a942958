"""The command `tfdist`: a table of sub-commands.

Only the sub-commands that need TensorFlow import it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfdist_ext import __version__
from tfdist_ext.cli import check, env, plan, run, verify
from tfdist_ext.errors import LaunchError, TaskError, TfDistError
from tfdist_ext.launcher.exit_codes import FAILED

_USAGE_ERROR = 2
_INTERRUPTED = 130
# Each has SUMMARY, USAGE, EPILOG, add_options(parser) and run(options, words after --).
_COMMANDS = {
    "run": run,
    "check": check,
    "env": env,
    "plan": plan,
    "verify": verify,
}


class _Parser(argparse.ArgumentParser):
    """A parser that prints an error as one sentence with advice, like all our errors."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tfdist`; the exit status is returned, also for --help and for errors (2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except TfDistError as error:
        text = str(error)
        if isinstance(error, TaskError):  # its traceback was shown
            text = " ".join(dict.fromkeys([text.partition("\n")[0], text.rpartition("\n")[2]]))
        print("\n".join([f"tfdist: error: {text}", *error.__notes__]), file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:  # before anything was started; later it is an event of the run
        return _INTERRUPTED
    except SystemExit as exit:  # of argparse after --help, or of a user's module
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return FAILED


def _dispatch(words: list[str]) -> int:
    dashes = "--" in words
    at = words.index("--") if dashes else len(words)
    before, command_line = words[:at], words[at + 1 :]
    parser = _parser()
    if not before:
        parser.print_help()
        return _USAGE_ERROR
    options, unknown = parser.parse_known_args(before)
    name, command = options.command, _COMMANDS[options.command]
    takes_command = " -- " in command.USAGE
    if unknown and takes_command and not dashes and not unknown[0].startswith("-"):
        raise LaunchError(
            f"the command to run must come after --. Write: tfdist {name} [options] --"
            f" {' '.join(unknown)}"
        )
    if unknown:
        raise LaunchError(f"unknown arguments: {' '.join(unknown)}. See tfdist {name} --help.")
    if dashes and not takes_command:
        raise LaunchError(f"tfdist {name} runs no command. Remove the words after --.")
    return int(command.run(options, command_line))


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
