"""Each private name of Keras that the package uses is there and does what is used of it.

If a release of Keras moves a name, the failing test shows the name and its purpose.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfdist_ext.private_names import PrivateNames
from tfdist_ext.training import _keras_private, _tf_private, distribution


@pytest.mark.parametrize("names", [_keras_private.NAMES, _tf_private.NAMES])
def test_names_in_modules(names: PrivateNames) -> None:
    for name in names.uses:
        assert names(name) is not None


@pytest.mark.parametrize("replacement", _keras_private.REPLACED, ids=lambda each: each.why)
def test_what_is_replaced_in_steps_is_there(replacement: _keras_private.Replacement) -> None:
    missing = f"Keras {keras.__version__} moved one of {replacement.paths}"
    assert len({*replacement.targets()}) >= len(replacement.paths), missing
    assert replacement.why


def test_a_step_replaces_few_functions() -> None:
    assert sum(len(replacement.paths) for replacement in _keras_private.REPLACED) <= 24


K = keras.callbacks


def trained_model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    return model


def test_attributes_of_objects() -> None:
    """Each attribute that the module looks up by `NAMES.of` is on the object that it is for."""
    model = trained_model()
    holders: dict[str, Any] = {
        "_loss_ids": model,
        "_value": model.weights[0],
        "_symbolic_build": model,
        "_flatten_layers": model,
        "_seed_generators": model.layers[1],
        "_compile_config": model,
        "_flatten_metrics_in_order": model,
        "_should_trace": K.TensorBoard("x", profile_batch=0),
        "_trainable_variables": model.optimizer,
        "_variables": model.optimizer,
        "_var_key": model.optimizer,
        "_initialize_with_initializer": model.weights[0],
        "_distribution_strategy": model.optimizer,
        "_all_reduce_sum_gradients": model.optimizer,
        "_learning_rate": model.optimizer,
        "_iterations": model.optimizer,
    }
    source = Path(_keras_private.__file__).read_text()
    assert {*re.findall(r'NAMES\.of\([\w.]+, "(\w+)"', source)} == {*holders}
    for name, holder in holders.items():
        assert hasattr(holder, name), f"Keras {keras.__version__} moved {name} of {holder}"
    assert "_use_cached_eval_dataset" in inspect.signature(keras.Model.evaluate).parameters or (
        "_use_cached_eval_dataset" in inspect.getsource(keras.Model.evaluate)
    )


CALLBACKS = {
    name: kind
    for name, kind in vars(K).items()
    if isinstance(kind, type) and issubclass(kind, K.Callback) and kind is not K.Callback
}

# They run on every worker, and write nothing.
EVERYWHERE = {
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ReduceLROnPlateau",
    "SwapEMAWeights",
    "TerminateOnNaN",
}


def test_every_callback_of_keras_is_known() -> None:
    """A new one may write files on every worker, or have a state that no checkpoint holds."""
    writers = {kind.__name__ for kind in distribution._WRITING_CALLBACKS}
    assert {*CALLBACKS} - writers - EVERYWHERE <= {"BackupAndRestore", "CallbackList"}
    assert not writers & EVERYWHERE


STATEFUL: dict[str, Any] = {
    "EarlyStopping": lambda: K.EarlyStopping(),
    "ReduceLROnPlateau": lambda: K.ReduceLROnPlateau(),
    "ModelCheckpoint": lambda: K.ModelCheckpoint("x.keras"),
    "TensorBoard": lambda: K.TensorBoard("x"),
    "SwapEMAWeights": lambda: K.SwapEMAWeights(),
    "History": lambda: K.History(),
    "CSVLogger": lambda: K.CSVLogger("x"),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_what_callbacks_remember(name: str) -> None:
    """Each name is an attribute of the callback, after it has begun, or stands in its source."""
    kind = getattr(K, name)
    attributes = _keras_private.remembered_by(STATEFUL[name]())
    assert attributes
    source = "".join(inspect.getsource(base) for base in kind.__mro__[:-1])
    assert [each for each in attributes if f"self.{each}" not in source] == []


# What the package does in the place of these bodies, or relies on, was compared with them. When
# one changes, read it again, and take over what is new.
BODIES = {
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit": "a9a6dc02a7ddafa8",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.evaluate": "a1facf6528168e8d",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict": "ee5831d7d2179667",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.train_step": "debf0efab9d5794b",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.test_step": "a8f04a25512e74e2",
    "keras.src.trainers.epoch_iterator:EpochIterator": "805f917ff4beb967",
    "keras.src.trainers.trainer:Trainer.compute_loss": "450e48288d4857f0",
    "keras.src.losses.loss:reduce_weighted_values": "1976df12ea192061",
    "keras.src.losses.loss:apply_mask": "61d8938cd8663dee",
    "keras.src.layers.normalization.batch_normalization:BatchNormalization": "8b3a382b7d4c194b",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._clip_gradients": "152b956e23c91ad9",
    "keras.src.optimizers.base_optimizer:clip_by_global_norm": "830373890dfdadc0",
    "keras.src.optimizers.base_optimizer:global_norm": "90140ce5720fac7b",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer": "d96346a68ba7091c",
}
COMPARED_WITH = "3.15"  # release of Keras


@pytest.mark.skipif(
    not keras.__version__.startswith(COMPARED_WITH), reason=f"compared with Keras {COMPARED_WITH}"
)
@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_those_that_were_read(path: str) -> None:
    source = inspect.getsource(pkgutil.resolve_name(path))
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == BODIES[path]


class Seen(keras.layers.Layer):
    """Counts how often it is called with tensors."""

    calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += not isinstance(inputs, keras.KerasTensor)
        return keras.ops.cast(inputs, self.compute_dtype)


def graph_of(
    outputs: Callable[[Any], Any],
    shape: tuple[int | None, ...] = (4,),
    kind: type[keras.Model] = keras.Model,
) -> keras.Model:
    inputs = keras.Input(shape)
    return kind(inputs, outputs(Seen(name="seen")(inputs)))


def dense(name: str, units: int = 2, **named: Any) -> keras.Layer:
    return keras.layers.Dense(units, name=name, **named)


class OfTwo(keras.Model):
    """A user's class of functional model whose call does more than its graph."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return 2 * super().call(inputs)


def rows_of(shape: tuple[int | None, ...]) -> np.ndarray:
    sizes = [8, *(size or 3 for size in shape[1:])]
    return np.linspace(-1, 1, int(np.prod(sizes)), dtype="float32").reshape(sizes)


def part_and_head() -> keras.Model:
    return graph_of(lambda x: dense("b")(graph_of(dense("a"))(x)))


def narrow() -> keras.Model:
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    inputs = keras.Input((4,))
    return keras.Model(inputs, dense("a", dtype=policy)(Seen(name="seen", dtype=policy)(inputs)))


BOTH = {"a": "mse", "b": "mae"}
METRICS_OF_BOTH = {"a": ["mae"], "b": ["mse", "mae"]}


@pytest.mark.parametrize(
    ("build", "losses", "metrics", "calls"),
    [
        (lambda: graph_of(dense("a")), "mse", ["mae"], 0),
        (lambda: graph_of(lambda x: [dense("a")(x)]), "mse", ["mae"], 0),
        (
            lambda: keras.Sequential([keras.Input((4,)), Seen(name="seen"), dense("a")]),
            "mse",
            ["mae"],
            0,
        ),
        (lambda: graph_of(lambda x: [dense("a")(x), dense("b")(x)]), BOTH, METRICS_OF_BOTH, 0),
        (
            lambda: graph_of(lambda x: {"b": dense("b")(x), "a": dense("a", 3)(x)}),
            BOTH,
            METRICS_OF_BOTH,
            0,
        ),
        (part_and_head, "mse", ["mae"], 0),
        (narrow, "mse", ["mae"], 0),
        (lambda: graph_of(dense("a"), (None, 4)), "mse", ["mae"], 1),  # the data have 3 for None
        (lambda: graph_of(dense("a"), kind=OfTwo), "mse", ["mae"], 1),
    ],
)
def test_a_graph_of_layers_is_not_called_for_the_shapes_of_its_outputs(
    build: Callable[[], keras.Model], losses: Any, metrics: Any, calls: int
) -> None:
    """Metrics and losses are those that Keras makes from a call, and so are their values."""
    plain, ours = build(), build()
    for model in (plain, ours):
        model.compile("sgd", losses, metrics=metrics)
    ours.set_weights(plain.get_weights())
    x = rows_of(plain.inputs[0].shape)
    targets = [rows_of(output.shape) for output in plain.outputs]
    y = dict(zip("ab", targets, strict=True)) if len(targets) == 2 else targets[0]
    expected = plain.evaluate(x, y, verbose=0, return_dict=True)
    before = ours.get_layer("seen").calls
    batch = keras.tree.map_structure(
        lambda value: keras.KerasTensor((None, *value.shape[1:]), value.dtype), (x, y)
    )
    _keras_private.symbolic_build(ours, batch)
    assert ours.get_layer("seen").calls - before == calls
    built = [(variable.name, variable.shape) for variable in ours.metrics_variables]
    assert built == [(variable.name, variable.shape) for variable in plain.metrics_variables]
    assert ours.optimizer.built
    assert ours.evaluate(x, y, verbose=0, return_dict=True) == expected


def test_a_sequential_model_that_takes_a_dict_is_called() -> None:
    class OfB(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs["b"]

    model = keras.Sequential([OfB(), dense("c")])
    model({"b": np.ones((2, 3))})
    model.compile("sgd", "mse", metrics=["mae"])
    b, y = keras.KerasTensor((None, 3)), keras.KerasTensor((None, 2))
    _keras_private.symbolic_build(model, ({"b": b}, y))
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics"]
    assert len(model.metrics_variables) == 4
