"""tfdist plan: where each variable of a model would live, before any machine is paid for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfdist_ext.errors import PlacementError, TfDistError
from tfdist_ext.launcher.output import STARTUP_NOISE

SUMMARY = "show how many bytes each parameter server or worker would hold"
USAGE = "plan module:builder [options]"

EPILOG = """\
The function is called once, with variables that have shapes and no values: nothing is allocated.

examples:
  tfdist plan train.py:build --ps 4 --optimizer adam --budget 8GiB
  tfdist plan train.py:build --workers 8 --optimizer adam
  tfdist plan my.models:build --ps 4 --rule 'users/.*=sharded(4)' --json plan.json
  tfdist plan train.py:build --ps 4 --compare --devices 8"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist plan`."""
    add = parser.add_argument
    builder = "function without arguments that returns a built Keras model, such as train.py:build"
    add("builder", metavar="module:builder", help=builder)
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument("--ps", type=int, metavar="N", help="number of parameter servers")
    workers = "number of workers that share the optimizer's slots (shard_optimizer=True)"
    targets.add_argument("--workers", type=int, metavar="N", help=workers)
    add("--optimizer", metavar="NAME", help="count this optimizer's slots (default: the model's)")
    budget = "maximum size of variables and slots on each task, such as 8GiB"
    add("--budget", metavar="SIZE", help=budget)
    rule = "'task 0', 'sharded(4)' or 'balanced' for variables whose path matches; may be repeated"
    add("--rule", action="append", default=[], metavar="PATTERN=PLACEMENT", help=rule)
    add("--picture", type=Path, metavar="FILE", help="draw the plan into this .svg or .png file")
    add("--json", type=Path, metavar="FILE", help="write the plan for create_strategy(placement=)")
    add(
        "--compare",
        action="store_true",
        help="with --ps: also print the bytes per device of other strategies",
    )
    devices = "with --compare: number of replicas on one machine (default 1)"
    add("--devices", type=int, default=1, metavar="N", help=devices)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Plan, print, and write the files that the options ask for. Returns 0."""
    from tfdist_ext.placement import Rule, compare  # needs numpy, as not every command does
    from tfdist_ext.placement.placement_plan import check_file
    from tfdist_ext.placement.rules import placement_from

    rules = [Rule(pattern, placement_from(text)) for pattern, text in map(_split, options.rule)]
    if options.picture is not None:
        check_file(options.picture)  # before the model is built
    if options.compare and options.ps is None:
        raise PlacementError("--compare needs --ps. Add --ps N, the number of parameter servers.")
    if options.json is not None and options.json.suffix != ".json":
        raise PlacementError(f"the file of a plan must end in .json, got {str(options.json)!r}.")
    builder = load_function(options.builder, "the builder", error=PlacementError)
    from tfdist_ext.placement.live.learning import plan_placement

    plan = plan_placement(
        builder,
        ps=options.ps,
        workers=options.workers,
        rules=rules,
        optimizer=options.optimizer,
        budget=options.budget,
    )
    print(plan)
    if options.compare:
        print(f"\n{compare(plan.specs, options.devices, plan)}")
    if options.picture is not None:
        plan.save_picture(options.picture)
    if options.json is not None:
        try:
            options.json.write_text(plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise PlacementError(f"the plan cannot be written: {error}") from error
    return 0


def load_function(text: str, what: str, *, error: type[TfDistError]) -> Callable[[], Any]:
    """The function of "module:name" or "file.py:name"; TensorFlow starts without its usual lines.

    Args:
        what: the argument, for messages.
        error: the type of the error.

    Raises:
        TfDistError: of type `error`: the text has another form, or there is no such module, file
            or function.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise error(
            f"{what} must be written module:function, such as train.py:build or my.models:build,"
            f" got {text!r}."
        )
    folder, module = os.getcwd(), place
    if place.endswith(".py"):
        folder, module = os.path.split(os.path.abspath(place.removesuffix(".py")))
    sys.path.insert(0, folder)  # as Python does for a script
    try:
        with _without_startup_lines():
            function = getattr(importlib.import_module(module), name)
            import tensorflow as tf

            tf.config.list_physical_devices()
            return function
    except (ModuleNotFoundError, AttributeError) as missing:
        raise error(f"{what} {text!r} cannot be imported: {missing}.") from missing


@contextlib.contextmanager
def _without_startup_lines() -> Iterator[None]:
    """Leaves TensorFlow's lines about CPUs and missing GPUs out of stderr, as `tfdist run` does."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as text:
        os.dup2(text.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            text.seek(0)
            lines = (line for line in text if not STARTUP_NOISE.fullmatch(line.rstrip()))
            sys.stderr.writelines(lines)


def _split(rule: str) -> tuple[str, str]:
    pattern, equals, placement = rule.rpartition("=")
    if not equals:
        raise PlacementError(
            "a rule must be written PATTERN=PLACEMENT, such as 'users/.*=sharded(4)', got"
            f" {rule!r}."
        )
    return pattern.strip(), placement
