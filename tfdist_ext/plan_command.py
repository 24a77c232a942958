"""tfdist plan: where each variable of a model would live, before any machine is paid for."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import nearest

if TYPE_CHECKING:
    from tfdist_ext.placement import PlacementPlan, Rule

__all__ = ["EPILOG", "SUMMARY", "USAGE", "add_options", "run"]

SUMMARY = "where each variable of a model would live on parameter servers"
USAGE = "plan module:builder [options]"

EPILOG = """\
The function is called once, with variables that have shapes and no values: nothing is allocated.

examples:
  tfdist plan train.py:build --ps 4 --optimizer adam --budget 8GiB
  tfdist plan my.models:build --ps 4 --rule 'users/.*=sharded(4)' --json plan.json
  tfdist plan train.py:build --ps 4 --compare --devices 8"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    builder = "a function without arguments that returns a built Keras model, as train.py:build"
    add("builder", metavar="module:builder", help=builder)
    add("--ps", type=int, required=True, metavar="N", help="parameter servers")
    add("--optimizer", metavar="NAME", help="its slots are counted (default: the model's own)")
    budget = "the most a server may hold, as 8GiB; once for all, or once for each"
    add("--budget", action="append", metavar="SIZE", help=budget)
    rule = "'task 0', 'sharded(4)' or 'balanced' for paths that match; may be repeated"
    add("--rule", action="append", default=[], metavar="PATTERN=PLACEMENT", help=rule)
    picture = "draw the plan, .svg or .png (needs matplotlib)"
    add("--picture", type=Path, metavar="FILE", help=picture)
    add("--json", type=Path, metavar="FILE", help="write the plan, to be applied")
    add("--compare", action="store_true", help="also the bytes per device of other strategies")
    devices = "with --compare: replicas, on devices or workers (default 1)"
    add("--devices", type=int, default=1, metavar="N", help=devices)
    lookups = "with --compare: ids a step looks up in each embedding: batch size x ids per example"
    add("--lookups", type=int, default=1024, metavar="N", help=f"{lookups} (default 1024)")


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Plan, print, and write what is asked for; 0, or the error of a plan that cannot be."""
    from tfdist_ext.placement import compare, rules_from  # they need numpy, and not every command
    from tfdist_ext.placement.picture import require_matplotlib

    rules = rules_from(dict(_rule(text) for text in options.rule))
    for path, suffixes in ((options.picture, (".svg", ".png")), (options.json, (".json",))):
        if path is not None and path.suffix.lower() not in suffixes:
            raise PlacementError(
                f"the file must end in {' or '.join(suffixes)}, got {str(path)!r}; name it so."
            )
    if options.picture is not None:
        require_matplotlib()  # before a model is built for nothing
    plan = _planned(options, rules)
    print(plan)
    if options.compare:
        print(f"\n{compare(plan.specs, options.devices, options.ps, options.lookups)}")
    _write(plan, options)
    return 0


def _planned(options: argparse.Namespace, rules: Sequence[Rule]) -> PlacementPlan:
    builder = _builder(options.builder)
    from tfdist_ext.placement.live.learning import plan_placement

    budget: Any = options.budget
    return plan_placement(
        builder,
        ps=options.ps,
        rules=rules,
        optimizer=options.optimizer,
        budget=budget[0] if budget and len(budget) == 1 else budget,
    )


def _builder(text: str) -> Callable[[], Any]:
    """The function of "module:name" or "file.py:name".

    Raises:
        PlacementError: not written so, no such module or file, or nothing callable of that name.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise PlacementError(
            "the builder must be written module:function, as train.py:build or my.models:build, got"
            f" {text!r}."
        )
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise PlacementError(
            f"{place} has no function {name!r}. {nearest(name, functions) if functions else ''}"
        )
    return function


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise PlacementError(f"the module {place!r} cannot be imported: {error}.") from error
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PlacementError(f"there is no file {place!r}.")
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, placement = text.rpartition("=")
    if not equals:
        raise PlacementError(
            f"a rule must be written PATTERN=PLACEMENT, as 'users/.*=sharded(4)', got {text!r}."
        )
    return pattern.strip(), placement


def _write(plan: PlacementPlan, options: argparse.Namespace) -> None:
    if options.picture is not None:
        plan.save_picture(options.picture)
    if options.json is not None:
        try:
            options.json.write_text(plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise PlacementError(f"the plan cannot be written: {error}") from error
