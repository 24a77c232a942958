"""Writes the packages, the path of a fit and the replaced functions into architecture.md.

    .venv/bin/python scripts/figures/architecture.py [--check]

The program runs a `fit` and records the modules of `training/` whose functions are called, in the
order of their first call. With --check, the program writes nothing and fails if the page would
change.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tfdist_ext" / "training"
PAGE = ROOT / "docs" / "architecture.md"
MOST_MODULES = 14


def main(words: list[str] | None = None) -> int:
    """Returns 1 if a fit passes too many modules, or if `--check` finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page would change")
    arguments = parser.parse_args(words)
    from tfdist_ext.testing import run_tasks

    synchronous = run_tasks(path_of_fit, None, timeout=300)["process"]
    on_servers = run_tasks(path_of_fit, {"worker": 1, "ps": 1}, timeout=300)["chief:0"]
    old = PAGE.read_text(encoding="utf-8")
    new = old
    for name, text in {
        "rooms": rooms(),
        "path of fit": paths({"synchronous": synchronous, "parameter servers": on_servers}),
        "replaced functions": replaced(),
    }.items():
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        before, rest = new.split(begin)
        new = f"{before}{begin}{text}\n{rest[rest.index(end) :]}"
    print(new if new != old else "up to date")
    if not arguments.check:
        PAGE.write_text(new, encoding="utf-8")
    longest = max(len(synchronous), len(on_servers))
    if longest > MOST_MODULES:
        print(f"a fit must pass at most {MOST_MODULES} modules of training/, got {longest}")
    return int(longest > MOST_MODULES or (arguments.check and new != old))


def rooms() -> str:
    """A table of the rooms of training/, with what each says of itself."""
    lines = ["| package | what belongs there | modules |", "|---|---|---|"]
    folders = sorted(path.parent for path in TRAINING.rglob("__init__.py"))
    for folder in folders:
        modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
        name = "training/" if folder == TRAINING else f"{folder.name}/"
        listed = ", ".join(f"`{module}`" for module in modules)
        lines.append(f"| `{name}` | {first_line(folder / '__init__.py')} | {listed} |")
    return "\n".join(lines)


def paths(found: dict[str, list[str]]) -> str:
    """A table of the modules that a fit passes, for each side."""
    lines = []
    for side, modules in found.items():
        lines += ["", f"{side.capitalize()}, {len(modules)} modules:", ""]
        lines += ["| module | what it is |", "|---|---|"]
        lines += [f"| `{module}` | {first_line(TRAINING / module)} |" for module in modules]
    return "\n".join(lines[1:])


def replaced() -> str:
    """A table of the functions that do something else while a step runs."""
    from tfdist_ext.training._keras_private import REPLACED

    lines = ["| function | in a step |", "|---|---|"]
    for replacement in REPLACED:
        for number, path in enumerate(replacement.paths):
            why = "the same" if number else replacement.why
            lines.append(f"| `{path.replace(':', '.')}` | {why} |")
    return "\n".join(lines)


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.splitlines()[0].rstrip(".")


def path_of_fit() -> list[str]:
    """In a task: the modules of training/ that `fit` on NumPy arrays calls, in this order."""
    import keras
    import numpy as np

    import tfdist_ext as tfd
    from tfdist_ext.testing import logical_cpus

    if tfd.ClusterConfig.from_env() is None:
        logical_cpus(2)
        strategy = tfd.create_strategy("mirrored", devices=["CPU:0", "CPU:1"])
        return _recorded(keras, np, tfd, strategy)
    return tfd.run(lambda: _recorded(keras, np, tfd, tfd.create_strategy())) or []


def _recorded(keras: Any, np: Any, tfd: Any, strategy: Any) -> list[str]:
    def build() -> Any:
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("adam", "mse", metrics=["mae"])
        return model

    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and "/training/" in code.co_filename:
            path = Path(code.co_filename)
            if TRAINING in path.parents:
                seen.setdefault(str(path.relative_to(TRAINING)))

    model = tfd.distribute(build, strategy)
    x = np.ones((64, 3), "float32")
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        model.fit(x, x[:, :1], epochs=2, batch_size=8, verbose=0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(seen)


if __name__ == "__main__":
    sys.exit(main())
