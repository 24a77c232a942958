"""tfdist verify: does a model train on several replicas as it does on one device?"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from tfdist_ext.cli.plan import load_function
from tfdist_ext.launcher.functions import launch

if TYPE_CHECKING:
    from tfdist_ext.training.verify import Verification

SUMMARY = "train a few batches on one device and on several replicas, and compare all numbers"
USAGE = "verify module:builder --data module:function [options]"

EPILOG = """\
The builder returns a compiled Keras model. The data function returns arrays (x, y), or a dataset of
global batches. Both are functions without arguments. The exit status is 1 if any numbers differ.

examples:
  tfdist verify train.py:build --data train.py:data --devices 4
  tfdist verify train.py:build --data train.py:data --workers 2 --batch-size 64"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tfdist verify`."""
    add = parser.add_argument
    builder = "function that returns a compiled model, as train.py:build"
    add("builder", metavar="module:builder", help=builder)
    add("--data", required=True, metavar="module:function", help="function that returns the data")
    strategy = "default mirrored, or multi_worker_mirrored with --workers"
    add("--strategy", metavar="NAME", help=strategy)
    where = parser.add_mutually_exclusive_group()
    devices = "number of replicas, on logical CPUs (default 2)"
    where.add_argument("--devices", type=int, default=2, metavar="N", help=devices)
    where.add_argument("--workers", type=int, metavar="N", help="number of workers on this machine")
    batch_size = "global batch size for arrays (default 32)"
    add("--batch-size", type=int, default=32, metavar="N", help=batch_size)
    steps = "number of global batches to train on (default 3)"
    add("--steps", type=int, default=3, metavar="N", help=steps)
    synchronize = "normalize over the global batch: tfd.distribute(synchronize_batch_norm=True)"
    add("--synchronize-batch-norm", action="store_true", default=None, help=synchronize)
    lazy = "update rows of tables as with tfd.distribute(lazy_updates=True)"
    add("--lazy-updates", action="store_true", help=lazy)
    add("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Compare, print the table, and return 0 if all numbers are equal."""
    if options.workers is None:
        result = _verify(options)
    else:
        result = launch(_verify, args=(options,), workers=options.workers)["worker:0"]
    print(result)
    return 0 if result.equal else 1


def _verify(options: argparse.Namespace) -> Verification:
    """Compare in this process, which is a task of a cluster if `options.workers` is set."""
    builder = load_function(options.builder, "the builder")
    data_function = load_function(options.data, "the data function")
    from absl import flags

    from tfdist_ext.strategies import create_strategy
    from tfdist_ext.training.verify import verify

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # the flags of the script have their defaults
    logging.getLogger("tensorflow").setLevel("ERROR")  # it warns when many models are traced
    if options.workers is None:
        strategy = create_strategy(options.strategy or "mirrored", logical_cpus=options.devices)
    else:
        strategy = create_strategy(options.strategy or "multi_worker_mirrored")
    return verify(
        builder,
        data_function,
        strategy,
        steps=options.steps,
        tolerance=options.tolerance,
        synchronize_batch_norm=options.synchronize_batch_norm,
        lazy_updates=options.lazy_updates,
        batch_size=options.batch_size,
    )
