"""tfdist plan: the memory of servers and workers, and the speed of more workers, before you pay."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist_ext.errors import LaunchError, PlacementError
from tfdist_ext.launcher.output import STARTUP_NOISE

if TYPE_CHECKING:
    from tfdist_ext.placement import PlacementPlan
    from tfdist_ext.placement.scaling import WorkersPlan

SUMMARY = "show what each parameter server or worker would hold, and how fast workers would be"
USAGE = "plan module:builder [options]"

EPILOG = """\
The function is called once, with variables that have shapes and no values: nothing is allocated.
With --network and --data, the model is built and trained for a few seconds.

examples:
  tfdist plan train.py:build --data train.py:data --workers 1,2,4,8 --network 10Gbit
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
    workers = (
        "number of workers that share the optimizer's slots (shard_optimizer=True); with --network"
        " several numbers, such as 1,2,4"
    )
    targets.add_argument("--workers", type=numbers, metavar="N", help=workers)
    network = "compute the speed of workers that send at this rate, such as 10Gbit or 100Mbit/s"
    add("--network", metavar="RATE", help=network)
    data = "with --network: function that returns the data of the steps to time"
    add("--data", metavar="module:function", help=data)
    step = "with --network: the time of a step measured elsewhere, such as 0.35s, instead of timing"
    add("--step", metavar="TIME", help=step)
    latency = "with --network: the time until a message arrives (default 0.1ms)"
    add("--latency", metavar="TIME", help=latency)
    batch_size = "with --network: rows of a batch of arrays (default 32)"
    add("--batch-size", type=int, metavar="N", help=batch_size)
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
    add("--devices", type=int, metavar="N", help=devices)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Plan, print, and write the files that the options ask for. Returns 0."""
    from tfdist_ext.placement.placement_plan import check_file  # needs numpy

    if options.picture is not None:
        check_file(options.picture)  # before the model is built
    _check_partners(options)
    plan: WorkersPlan | PlacementPlan
    if options.network is not None:
        plan = _plan_workers(options)
        print(plan)
    else:
        plan = _plan_placement(options)
    if options.picture is not None:
        plan.save_picture(options.picture)
    return 0


def _check_partners(options: argparse.Namespace) -> None:
    """Refuses options that do nothing without another option."""
    network = (options.network, "--network. Add --network 10Gbit.")
    compare = (options.compare, "--compare. Add --compare.")
    partners = {
        "data": network, "step": network, "latency": network, "batch_size": network,
        "devices": compare,
    }  # fmt: skip
    for name, (partner, advice) in partners.items():
        if getattr(options, name) is not None and not partner:
            raise PlacementError(f"--{name.replace('_', '-')} needs {advice}")
    if options.compare and options.ps is None:
        raise PlacementError("--compare needs --ps. Add --ps N, the number of parameter servers.")


def _plan_workers(options: argparse.Namespace) -> WorkersPlan:
    """Plan the speed of workers."""
    from tfdist_ext.placement.scaling import parse_rate, parse_seconds

    others = ("optimizer", "budget", "rule", "json", "compare")
    if options.workers is None or any(getattr(options, name) for name in others):
        raise PlacementError(
            "--network needs --workers, such as --workers 1,2,4, and cannot be combined with --ps,"
            f" --{', --'.join(others)}."
        )
    parse_rate(options.network, "--network")  # before TensorFlow is imported
    for name in ("latency", "step"):
        if (text := getattr(options, name)) is not None:
            parse_seconds(text, f"--{name}")
    builder = load_function(options.builder, "the builder")
    data = None if options.data is None else load_function(options.data, "the data function")
    from tfdist_ext.step_costs import plan_workers

    return plan_workers(
        builder,
        data,
        workers=options.workers,
        network=options.network,
        latency=options.latency or "0.1ms",
        step_seconds=options.step,
        batch_size=32 if options.batch_size is None else options.batch_size,
    )


def _plan_placement(options: argparse.Namespace) -> PlacementPlan:
    """Plan, print, and write the plan of variables."""
    from tfdist_ext.placement import Rule, compare
    from tfdist_ext.placement.rules import placement_from

    rules = [Rule(pattern, placement_from(text)) for pattern, text in map(_split, options.rule)]
    if options.json is not None and options.json.suffix != ".json":
        raise PlacementError(f"the file of a plan must end in .json, got {str(options.json)!r}.")
    if len(options.workers or ()) > 1:
        raise PlacementError(
            "--workers with several numbers needs --network, such as --network 10Gbit."
        )
    builder = load_function(options.builder, "the builder")
    from tfdist_ext.placement.live.learning import plan_placement

    plan = plan_placement(
        builder,
        ps=options.ps,
        workers=options.workers[0] if options.workers else None,
        rules=rules,
        optimizer=options.optimizer,
        budget=options.budget,
    )
    print(plan)
    if options.compare:
        devices = 1 if options.devices is None else options.devices
        print(f"\n{compare(plan.specs, devices, plan)}")
    if options.json is not None:
        try:
            options.json.write_text(plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise PlacementError(f"the plan cannot be written: {error}") from error
    return plan


def load_function(text: str, what: str) -> Callable[[], Any]:
    """The function of "module:name" or "file.py:name"; TensorFlow starts without its usual lines.

    Args:
        what: the argument, for messages.

    Raises:
        LaunchError: the text has another form, there is no such module, file or function, or a file
            has the name of a module that is imported already.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise LaunchError(
            f"{what} must be written module:function, such as train.py:build or my.models:build,"
            f" got {text!r}."
        )
    folder, module = os.getcwd(), place
    if place.endswith(".py"):
        folder, module = os.path.split(os.path.abspath(place.removesuffix(".py")))
    sys.path.insert(0, folder)  # as Python does for a script
    try:
        with _without_startup_lines():
            imported = importlib.import_module(module)
            import tensorflow as tf

            tf.config.list_physical_devices()
    except ModuleNotFoundError as missing:
        raise LaunchError(f"{what} {text!r} cannot be imported: {missing}.") from missing
    file = getattr(imported, "__file__", None)  # a module of C has none
    if place.endswith(".py") and os.path.realpath(place) != os.path.realpath(file or ""):
        raise LaunchError(
            f"{what} {text!r} cannot be imported: the name {module!r} is that of a module from"
            f" {file or 'Python itself'}. Rename {os.path.basename(place)}."
        )
    if not hasattr(imported, name):
        raise LaunchError(f"{what} {text!r} cannot be imported: {place} has no attribute {name!r}.")
    return getattr(imported, name)


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


def numbers(text: str) -> list[int]:
    """The numbers of "1,2,4"; argparse shows the name of this function."""
    return [int(number) for number in text.split(",")]


def _split(rule: str) -> tuple[str, str]:
    pattern, equals, placement = rule.rpartition("=")
    if not equals:
        raise PlacementError(
            "a rule must be written PATTERN=PLACEMENT, such as 'users/.*=sharded(4)', got"
            f" {rule!r}."
        )
    return pattern.strip(), placement
