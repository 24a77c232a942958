"""Writes the support of each public name of keras.Model into docs/training.md.

    .venv/bin/python scripts/figures/keras_model.py [--check]

With --check, the program writes nothing and fails if the page would change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BEGIN, END = "<!-- keras.Model begin -->\n", "<!-- keras.Model end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page would change")
    arguments = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    head, rest = old.split(BEGIN)
    new = f"{head}{BEGIN}{table()}\n{rest[rest.index(END) :]}"
    if not arguments.check:
        PAGE.write_text(new, encoding="utf-8")
    print("up to date" if new == old else new)
    return int(arguments.check and new != old)


def table() -> str:
    """A row for each public name of keras.Model."""
    import keras

    from tfdist_ext import DistributedModel
    from tfdist_ext.training.model import CREATING, REFUSED

    lines = ["| of `keras.Model` | of a `DistributedModel` | |", "|---|---|---|"]
    for name in sorted(set(dir(keras.Model)) | {"history", "optimizer", "stop_training"}):
        if name.startswith("_"):
            continue
        if name in REFUSED:
            how, what = "refused", REFUSED[name]
        elif name in CREATING:
            how, what = "works", "Creates objects for the strategy."
        elif own := getattr(DistributedModel, name, None):
            how, what = "works", (own.__doc__ or "").split("\n\n")[0]
        else:
            how, what = "delegated", ""
        lines.append(f"| `{name}` | {how} | {' '.join(what.split())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
