"""Workers that have different models or versions: an error before the first step.

What is compared is what a model computes with: config, code, variables, vocabularies and the like,
compile settings. Not compared is what may differ without harm: automatic names (a worker that made
another model before has dense_1 where others have dense), seeds, weights, which follow the chief.
"""

from __future__ import annotations

import contextlib
import platform
import re
import warnings
from collections.abc import Iterator

import keras
import tensorflow as tf

import tfdist_ext
from tfdist_ext.errors import TrainingError
from tfdist_ext.training.equality import check_equal_across_workers, difference_between_workers
from tfdist_ext.training.model_description import describe_model
from tfdist_ext.training.protocols import Reduction

__all__ = ["check_same_model", "check_same_versions", "variables_made_together"]


@contextlib.contextmanager
def variables_made_together() -> Iterator[None]:
    """Scope in which workers make the variables of a model, each with the chief's first value.

    Raises:
        TrainingError: TensorFlow says that they make different ones. They cannot compare any more.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(r"[^:]*[Cc]ollective instance[^\"\n]*", error.message)
        if found is None:
            raise
        raise TrainingError(
            "the models must be the same on all workers, but their variables are not:"
            f" {found[0].strip()} Build and compile the same model on every worker, from the same"
            " code and settings."
        ) from error


def check_same_versions(reduction: Reduction) -> bool:
    """Compare versions; every worker must call.

    Workers of other versions of TensorFlow, Keras or this package may make other collectives in a
    step, and then wait for each other forever. Python's own does not change a step: there is a
    warning, because code cannot be compared then.

    Returns:
        Whether Python is the same minor release everywhere.

    Raises:
        TrainingError: on every worker, where one's packages are not the first worker's.
    """
    advice = "install the same packages on every machine."
    versions = {
        "the version of TensorFlow": tf.__version__,
        "the version of Keras": keras.__version__,
        "the version of tfdist_ext": tfdist_ext.__version__,
    }
    check_equal_across_workers(reduction, versions, advice)
    python = {"the version of Python": ".".join(platform.python_version_tuple()[:2])}
    difference = difference_between_workers(reduction, python)
    if difference is not None and reduction.is_chief:
        warnings.warn(f"{difference}: {advice}", stacklevel=5)
    return difference is None


def check_same_model(reduction: Reduction, model: keras.Model, *, same_python: bool = True) -> None:
    """Compare models; every worker must call.

    Args:
        same_python: functions are compared by their bytecode, too.

    Raises:
        TrainingError: on every worker, where one's model is not the first worker's.
    """
    if not reduction.multi_worker:
        return
    described = describe_model(model, with_code=same_python)
    difference = difference_between_workers(reduction, described.certain)
    if difference is not None:
        raise TrainingError(
            f"the models differ: {difference}. All workers train one model together: build and"
            " compile the same one on every worker, from the same code and settings."
        )
    difference = difference_between_workers(reduction, described.attributes)
    if difference is not None and reduction.is_chief:
        warnings.warn(
            f"the models differ: {difference}. If that changes what the model computes, the"
            " workers train a mixture of models.",
            stacklevel=5,
        )
