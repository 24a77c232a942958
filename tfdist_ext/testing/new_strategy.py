"""Writes a strategy to begin with, and its conformance test beside it; overwrites nothing.

python -m tfdist_ext.testing.new_strategy my_strategy.py && pytest test_my_strategy.py
"""

from __future__ import annotations

import sys
from keyword import iskeyword
from pathlib import Path

from tfdist_ext.errors import StrategyError

__all__ = ["main", "write_strategy"]

# Imported by both files, or by pytest: a file of such a name would be taken for them.
_TAKEN = (
    "tfdist_ext",
    "tensorflow",
    "keras",
    "numpy",
    "pytest",
    "conftest",
    "__init__",
    "__main__",
)

_STRATEGY = '''"""{name}: say here what it does that no other strategy does."""

import tensorflow as tf

import tfdist_ext as tfd


class {name}(tfd.strategies.StrategyTemplate):
    """One replica for each device. Keep the hooks whose decision you change; delete the others."""

    def __init__(self, devices=None):
        # `devices`: names like "GPU:0", a number of devices, or None for all of them.
        super().__init__(devices)

    def create_variable(self, spec, create, beside=None):
        # Where is a variable created? `spec` has its path, shape, dtype, bytes and whether it is
        # trained. create(self.devices): a copy on each device; create(["CPU:0"]): one for all.
        # An optimizer's slot comes with the variable that it is `beside`.
        return super().create_variable(spec, create, beside)

    def read_variable(self, variable, copies):
        # How is a variable with several copies read outside of replicas, and saved?
        return super().read_variable(variable, copies)

    def update_variable(self, variable, copies, update):
        # How is an update applied? update(number) applies it to the copy of that number. All
        # copies must be equal afterwards. Delete this hook if it stays as it is: then each replica
        # computes the optimizer's step for its own copies, all at once.
        return super().update_variable(variable, copies, update)

    def reduce_values(self, op, values, devices, what):
        # How do the replicas' values become their sum or mean? A result is wanted for each of
        # `devices`. `what.kind` says what they are: a "gradient" (of `what.variable`), a "metric",
        # a "statistic", an "assignment" or "other". Slices are the gradients of embeddings; leave
        # them to super().
        if any(isinstance(value, tf.IndexedSlices) for value in values):
            return super().reduce_values(op, values, devices, what)
        total = values[0]
        for value in values[1:]:
            with tf.device(devices[0]):
                total = total + value
        if op == tf.distribute.ReduceOp.MEAN:
            with tf.device(devices[0]):
                total = total / len(values)
        return [total] * len(devices)

    def distribute_dataset(self, dataset, options):
        # How does experimental_distribute_dataset give a dataset out? By default each batch is
        # cut into one part for each replica.
        return super().distribute_dataset(dataset, options)
'''

_TEST = '''"""{name} does what every strategy must do, and trains what one device trains."""

from {module} import {name}

from tfdist_ext.testing import StrategyConformance, logical_cpus

logical_cpus(4)  # before TensorFlow's first operation; GPUs need nothing


class Test{name}(StrategyConformance):
    # tolerance = 1e-2    # where gradients are rounded on purpose
    # known_faults = {{"test_saved_model": "why it fails"}}    # expected to fail, until it is right

    def strategy(self):
        return {name}([f"CPU:{{number}}" for number in range(2)])
'''


def write_strategy(path: str | Path) -> tuple[Path, Path]:
    """Write a commented strategy on the template to `path`, and its conformance test beside it.

    Args:
        path: my_strategy.py, or MyStrategy.py, for a class MyStrategy. The test is beside it, in
            test_my_strategy.py or test_MyStrategy.py.

    Returns:
        The paths of both files.

    Raises:
        StrategyError: a name that no module can have, or that another one has, a folder that is
            not there, or a file that is: nothing is overwritten.
    """
    strategy = Path(path)
    module = strategy.stem
    name = "".join(word[:1].upper() + word[1:] for word in module.split("_"))
    if strategy.suffix != ".py" or not name.isidentifier() or iskeyword(module):
        raise StrategyError(
            "the file of a strategy must be a Python module such as my_strategy.py, got"
            f" {strategy.name!r}."
        )
    if module in _TAKEN or module in sys.stdlib_module_names:
        raise StrategyError(
            "the file of a strategy must not have the name of another module, got"
            f" {strategy.name!r}: `import {module}` would find the other one. Take a new name such"
            " as my_strategy.py."
        )
    if not strategy.parent.is_dir():
        raise StrategyError(f"there is no folder {strategy.parent}: make it first.")
    test = strategy.with_name(f"test_{module}.py")
    for file in (strategy, test):
        if file.exists():
            raise StrategyError(f"{file} exists, and is not overwritten: take another name.")
    strategy.write_text(_STRATEGY.format(name=name), encoding="utf-8")
    test.write_text(_TEST.format(name=name, module=module), encoding="utf-8")
    return strategy, test


def main(command: str) -> None:
    """Write the files that the command line names, and say so; what is wrong ends the process.

    Args:
        command: what it is called, for messages.
    """
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: {command} my_strategy.py")
    try:
        strategy, test = write_strategy(sys.argv[1])
    except StrategyError as error:
        sys.exit(f"{command}: {error}")
    print(f"wrote {strategy} and {test}\nnow: python -m pytest {test}")


if __name__ == "__main__":
    main("python -m tfdist_ext.testing.new_strategy")
