"""Writes the options of each command into docs/command_line.md.

    .venv/bin/python scripts/figures/command_line.py [--check]

With --check, the program writes nothing and fails if the page would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"


def main(words: list[str] | None = None) -> int:
    """Returns 1 if `--check` finds a page that would change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page would change")
    arguments = parser.parse_args(words)
    from tfdist_ext import cli

    (commands,) = (action for action in cli._parser()._actions if isinstance(action.choices, dict))
    old = new = PAGE.read_text(encoding="utf-8")
    for name, command in commands.choices.items():
        begin, end = f"<!-- options of {name} begin -->\n", f"<!-- options of {name} end -->"
        if rows := options(command):
            before, _, rest = new.partition(begin)
            table = "\n".join(["| option | meaning |", "|---|---|", *rows])
            new = f"{before}{begin}{table}\n{rest[rest.index(end) :]}"
    if not arguments.check:
        PAGE.write_text(new, encoding="utf-8")
    print("up to date" if new == old else new)
    return int(arguments.check and new != old)


def options(command: argparse.ArgumentParser) -> list[str]:
    """One row of the table for each option but --help."""
    rows = []
    for action in command._actions:
        if not action.option_strings or "--help" in action.option_strings:
            continue
        value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
        names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
        text = re.sub(r"\s+", " ", (action.help or "") % {"default": action.default})
        rows.append(f"| {names} | {text} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())
