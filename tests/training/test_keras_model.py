"""What people do with a Keras model works with a distributed model, on two replicas."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf
from training_cases import (
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    classifier,
    compiled,
    mirrored,
    plain_fit,
    stack,
    strategy_of,
    weights_of,
)

import tfdist_ext as tfd

# NumPy asks variables with copies in a way that TensorFlow does not know.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(currentThread|getName):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated"),
]

FIT = {"batch_size": 16, "verbose": 0, "shuffle": False}


@keras.saving.register_keras_serializable("tests")
class Registered(keras.Model):
    """A subclass with a fit of its own, and an attribute that DistributedModel has, too."""

    def __init__(self, units: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.strategy = "my own"
        self.first = keras.layers.Dense(units, "tanh")
        self.second = keras.layers.Dense(1)
        self.fits = 0

    def call(self, x):
        return self.second(self.first(x))

    def fit(self, *args, **kwargs):
        self.fits += 1
        return super().fit(*args, **kwargs)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("tests")
class OfLayers(keras.Model):
    """A subclass of a functional model."""

    def __init__(self, **kwargs: Any) -> None:
        x = keras.Input((5,))
        super().__init__(x, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(x)), **kwargs)

    def get_config(self):
        return {}


def registered() -> keras.Model:
    return compiled(Registered(), "adam", metrics=["mae"])


def sequential() -> keras.Model:
    layers = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
    return compiled(stack(*layers), "adam", metrics=["mae"])


def functional() -> keras.Model:
    x = keras.Input((5,))
    y = keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(x))
    return compiled(keras.Model(x, y), "adam", metrics=["mae"])


def of_layers() -> keras.Model:
    return compiled(OfLayers(), "adam", metrics=["mae"])


KINDS = [sequential, functional, registered, of_layers]


@pytest.fixture(scope="module", params=KINDS, ids=lambda build: build.__name__)
def pair(request: pytest.FixtureRequest) -> tuple[keras.Model, Any]:
    """(plain model, distributed model) with the same weights, after an epoch."""
    plain, _ = plain_fit(request.param, X, Y, batch_size=16)
    model, _ = plain_fit(request.param, X, Y, batch_size=16)
    model.run_eagerly = False
    return plain, tfd.distribute(model, mirrored())


def is_plain(model: Any, like: Any) -> bool:
    """Whether a model has the class of the user, and nothing of ours."""
    return type(model) is like.__class__ and not isinstance(model, tfd.DistributedModel)


def test_class_and_attributes_are_those_of_the_user(pair: Any) -> None:
    plain, model = pair
    assert isinstance(model, (type(plain), keras.Model)), "the user's class"
    assert isinstance(model, tfd.DistributedModel)
    assert model.__class__ is type(plain)
    assert model.keras_model is model
    own = isinstance(model, Registered)
    assert model.strategy == "my own" if own else model.strategy is mirrored()
    assert set(dir(plain)) <= set(dir(model))


def test_training_equals_one_device(pair: Any) -> None:
    plain, model = pair
    before = getattr(model, "fits", 0)
    assert_same_history(plain.fit(X, Y, **FIT).history, model.fit(X, Y, **FIT).history)
    assert_same_weights(plain, model)
    assert getattr(model, "fits", 1) == before + 1


def test_copies_are_plain_keras_models(pair: Any, tmp_path: Path) -> None:
    _, model = pair
    predicted = model.predict(X, verbose=0)
    model.save(tmp_path / "one.keras")
    keras.saving.save_model(model, tmp_path / "two.keras")
    copies = [
        keras.saving.load_model(tmp_path / "one.keras"),
        keras.saving.load_model(tmp_path / "two.keras"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for other in copies:
        assert is_plain(other, model)
        np.testing.assert_allclose(other.predict(X, verbose=0), predicted, atol=1e-6)
        assert int(other.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy())
        np.testing.assert_allclose(
            other.optimizer.variables[2].numpy(), model.optimizer.variables[2].numpy(), atol=1e-7
        )
    # Keras clones a subclass of a functional model as a functional model.
    assert type(keras.models.clone_model(model)) is type(keras.models.clone_model(copies[0]))
    if not isinstance(model, keras.Sequential):
        made = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
        assert is_plain(made, model)


def test_tensorflow_saves_and_converts_it(pair: Any, tmp_path: Path) -> None:
    plain, model = pair
    predicted = model.predict(X, verbose=0)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    other = copy.deepcopy(model)
    other.set_weights([np.zeros_like(weight) for weight in weights_of(other)])
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    np.testing.assert_allclose(other.predict(X, verbose=0), predicted, atol=1e-6)
    if isinstance(plain, Registered):
        return  # its inputs are not known to TensorFlow
    tf.saved_model.save(model, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    served = loaded.signatures["serving_default"](tf.constant(X))
    np.testing.assert_allclose(served["output_0"], predicted, atol=1e-6)
    lite = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    interpreter = tf.lite.Interpreter(model_content=lite)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], X[:1])
    interpreter.invoke()
    output = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    np.testing.assert_allclose(output, predicted[:1], atol=1e-5)


def test_it_is_a_layer_of_other_models() -> None:
    results = []
    for strategy in (None, mirrored()):
        model, _ = plain_fit(sequential, X, Y, batch_size=16)
        model.run_eagerly = False
        if strategy is not None:
            tfd.distribute(model, strategy)
        features = keras.Model(model.inputs, model.layers[-2].output)
        outputs = [features.predict(X, verbose=0)]
        x = keras.Input((5,))
        for outer in (stack(model, keras.layers.Dense(1)), keras.Model(x, model(x) * 2.0)):
            outer.set_weights([np.full_like(weight, 0.1) for weight in outer.get_weights()])
            compiled(outer, keras.optimizers.SGD(0.1))
            if strategy is not None:
                tfd.distribute(outer, strategy)
            outer.fit(X, Y, **FIT)
            model.fit(X, Y, **FIT)
            outputs += [outer.predict(X, verbose=0), model.predict(X, verbose=0)]
        results.append(outputs)
    for expected, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("fitted", [False, True])
def test_a_model_that_is_not_distributed_does_not_train_one_that_is(fitted: bool) -> None:
    """Not even by a step that was compiled before the inner model was distributed."""
    models = []
    for strategy in (None, mirrored()):
        keras.utils.set_random_seed(1)
        inner = stack(keras.layers.Dense(3, "tanh"))
        outer = compiled(stack(inner, keras.layers.Dense(1)))
        if fitted:
            outer.fit(X, Y, **FIT)
        if strategy is not None:
            tfd.distribute(inner, strategy)
            with pytest.raises(tfd.TrainingError, match=r"inside of.*Distribute the outer model"):
                outer.fit(X, Y, **FIT)
        with tf.GradientTape():  # only a step of training is refused
            outer(X, training=True)
        assert outer.evaluate(X, Y, verbose=0) > 0
        inner.trainable = False
        compiled(outer).fit(X, Y, **FIT)
        inner.trainable = True
        compiled(outer)
        if strategy is not None:
            tfd.distribute(outer, strategy)
        outer.fit(X, Y, **FIT)
        models.append(outer)
    assert_same_weights(*models)


class InCallbacks(keras.callbacks.Callback):
    """Trains, evaluates and predicts in the middle of a training."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch
        self.results: list[Any] = []

    def act(self) -> None:
        model = self.model
        model.reset_metrics()
        fit = model.fit(X[:20], Y[:20], batch_size=8, verbose=0, shuffle=False)
        self.results += [
            fit.history["loss"],
            model.evaluate(X, Y, verbose=0),
            model.predict(X[:7], verbose=0).tolist(),
            model.predict_on_batch(X[:13]).tolist(),
            model.train_on_batch(X[:13], Y[:13]),
            model.test_on_batch(X[:13], Y[:13]),
        ]
        model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.by_batch:
            self.act()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.by_batch:
            self.act()


@pytest.mark.parametrize("by_batch", [False, True])
def test_calls_inside_of_callbacks(by_batch: bool) -> None:
    results = []
    for strategy in (None, mirrored()):
        model, _ = plain_fit(sequential, X, Y, batch_size=16)
        if strategy is not None:
            tfd.distribute(model, strategy)
            model.run_eagerly = False
        calls = InCallbacks(by_batch)
        model.fit(X, Y, batch_size=32, shuffle=False, verbose=0, epochs=2, callbacks=[calls])
        results.append((model, calls.results))
    (plain, expected), (ours, found) = results
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert_same_weights(plain, ours)


def test_two_models_in_threads() -> None:
    plain = [plain_fit(build, X, Y, batch_size=16)[0] for build in (sequential, functional)]
    models = [tfd.distribute(copy.deepcopy(model), mirrored()) for model in plain]
    with ThreadPoolExecutor(2) as threads:
        fits = [threads.submit(model.fit, X, Y, epochs=3, **FIT) for model in models]
        histories = [fit.result(timeout=100).history for fit in fits]
    for expected, history in zip(plain, histories, strict=True):
        assert_same_history(expected.fit(X, Y, epochs=3, **FIT).history, history)


class Gan(keras.Model):
    """Its parts are compiled by themselves, and its step uses their optimizers."""

    def __init__(self, generator: keras.Model, critic: keras.Model) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def call(self, x):
        return self.critic(self.generator(x))

    def train_step(self, data):
        x, y = data
        losses = {}
        for part, sign in ((self.critic, 1.0), (self.generator, -1.0)):
            with tf.GradientTape() as tape:
                scores = self.critic(self.generator(x)) - self.critic(x) * y
                loss = sign * tf.reduce_mean(tf.tanh(scores))
            weights = part.trainable_weights
            part.optimizer.apply(tape.gradient(loss, weights), weights)
            losses[part.name] = loss
        return losses


def gan(strategy: tf.distribute.Strategy | None) -> keras.Model:
    """A GAN of parts that are distributed before the whole."""
    keras.utils.set_random_seed(1)
    generator = compiled(stack(keras.layers.Dense(5, name="out")), keras.optimizers.Adam(0.01))
    critic = compiled(stack(keras.layers.Dense(1)), keras.optimizers.SGD(0.1, momentum=0.9))
    generator.name, critic.name = "generator", "critic"
    if strategy is None:
        parts = generator, critic
    else:
        parts = tfd.distribute(generator, strategy), tfd.distribute(critic, strategy)
    model = Gan(*parts)
    model.build((None, 5))
    model.compile()
    return model if strategy is None else tfd.distribute(model, strategy)


def test_a_gan_of_distributed_models_resumes(tmp_path: Path) -> None:
    plain = gan(None)
    expected = plain.fit(X, Y, epochs=2, **FIT).history
    gan(mirrored()).fit(X, Y, epochs=1, checkpoint_dir=tmp_path, **FIT)
    ours = gan(mirrored())
    assert_same_history(expected, ours.fit(X, Y, epochs=2, checkpoint_dir=tmp_path, **FIT).history)
    assert_same_weights(plain, ours)
    for part in ("generator", "critic"):
        optimizers = getattr(plain, part).optimizer, getattr(ours, part).optimizer
        for a, b in zip(*(each.variables for each in optimizers), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    expected = plain.critic.fit(X, Y, **FIT).history
    assert_same_history(expected, ours.critic.fit(X, Y, **FIT).history)


def test_refused_and_what_to_call_instead() -> None:
    model = tfd.distribute(classifier(), mirrored())
    for kind in ("train", "test", "predict"):
        with pytest.raises(tfd.TrainingError, match=rf"^Do not call {kind}_step\(\).*{kind}_on_ba"):
            getattr(model, f"{kind}_step")((X, Y))
    for method in (keras.Model.fit, keras.Model.evaluate, keras.Model.predict):
        with pytest.raises(tfd.TrainingError, match=r"call super\(\)\.fit"):
            method(model, X, Y) if method is not keras.Model.predict else method(model, X)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # as in plain Keras
def test_a_search_of_keras_tuner(tmp_path: Path) -> None:
    results = []
    for strategy in (None, mirrored()):

        def build(hp: Any, strategy: Any = strategy) -> keras.Model:
            keras.utils.set_random_seed(1)
            units = hp.Choice("units", [2, 3, 4])
            model = stack(keras.layers.Dense(units, "tanh"), keras.layers.Dense(1))
            compiled(model, keras.optimizers.Adam(0.01))
            return model if strategy is None else tfd.distribute(model, strategy)

        tuner = keras_tuner.GridSearch(
            build, objective="val_loss", max_trials=3, directory=tmp_path / str(len(results))
        )
        tuner.search(X, Y, epochs=2, validation_data=(X[:25], Y[:25]), **FIT)
        (best,) = tuner.get_best_models(1)
        assert isinstance(best, tfd.DistributedModel) == (strategy is not None)
        trials = tuner.oracle.get_best_trials(3)
        scores = [(trial.hyperparameters.get("units"), trial.score) for trial in trials]
        results.append((scores, best.predict(X, verbose=0)))
    (expected, predicted), (scores, ours) = results
    assert [units for units, _ in scores] == [units for units, _ in expected]
    np.testing.assert_allclose([s for _, s in scores], [s for _, s in expected], rtol=1e-5)
    np.testing.assert_allclose(ours, predicted, atol=1e-6)


def test_scikit_learn_wrappers() -> None:
    wrapper = keras.wrappers.SKLearnRegressor(tfd.distribute(sequential, mirrored()))
    wrapper.fit(X, Y[:, 0], verbose=0)
    assert wrapper.predict(X).shape == (64,)
    results = []
    for strategy in (None, mirrored()):

        def build(X: Any, y: Any, strategy: Any = strategy) -> keras.Model:  # noqa: N803
            keras.utils.set_random_seed(1)
            model = stack(keras.layers.Dense(2, "softmax"))
            compiled(model, keras.optimizers.SGD(0.1), "categorical_crossentropy")
            return model if strategy is None else tfd.distribute(model, strategy)

        wrapper = keras.wrappers.SKLearnClassifier(build, fit_kwargs={"shuffle": False})
        wrapper.fit(X, Y[:, 0].astype(int), verbose=0)
        results.append(wrapper.model_.predict(X, verbose=0))
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)


def test_plots_and_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    model = tfd.distribute(functional, mirrored())
    model.summary()
    assert "Total params" in capsys.readouterr().out
    dot = keras.utils.model_to_dot(model).to_string()
    assert dot.count("Dense") == 2


def adam_without_decay_of_biases(model: keras.Model) -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=5.0)
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:1])
    return optimizer


def two_optimizers(model: keras.Model) -> keras.optimizers.Optimizer:
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01))
    optimizers[model.layers[1].kernel.path] = keras.optimizers.SGD(0.1)
    return keras.optimizers.MultiOptimizer(optimizers)


@pytest.mark.parametrize("make", [adam_without_decay_of_biases, two_optimizers])
def test_optimizers_know_variables_that_have_moved(make: Any) -> None:
    def build() -> keras.Model:
        model = stack(keras.layers.Dense(4, "tanh"), keras.layers.Dense(1))
        return compiled(model, make(model))

    plain, ours = (plain_fit(build, X, Y, batch_size=16)[0] for _ in range(2))
    ours.run_eagerly = False
    for strategy in (mirrored(2), mirrored(3), tf.distribute.get_strategy()):
        tfd.distribute(ours, strategy)
        plain.fit(X, Y, **FIT)
        ours.fit(X, Y, **FIT)
        assert_same_weights(plain, ours)


class OwnMetrics(keras.Model):
    """As a VAE of Keras's guides: the loss of compile() is not in `metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracker")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.dense(x)


def test_a_metrics_property_that_leaves_metrics_out() -> None:
    given = tfd.distribute(compiled(OwnMetrics()), mirrored())
    after = compiled(tfd.distribute(OwnMetrics, mirrored()))
    for model in (given, after):
        model.fit(X, Y, **FIT)
        assert np.isfinite(model.evaluate(X, Y, verbose=0, return_dict=True)["tracker"])


def test_graphs_from_before_read_what_is_trained() -> None:
    model, _ = plain_fit(lambda: compiled(stack(*map(keras.layers.Dense, (3, 1)))), X, Y)
    model.run_eagerly = False
    part = keras.Model(model.inputs, model.layers[0].output)
    function = tf.function(model)
    for strategy in (mirrored(2), tf.distribute.get_strategy()):
        before = part.predict(X, verbose=0), function(X)
        tfd.distribute(model, strategy).fit(X, Y, **FIT)
        fresh = keras.Model(model.inputs, model.layers[0].output).predict(X, verbose=0)
        assert abs(fresh - before[0]).max() > 1e-3
        np.testing.assert_array_equal(part.predict(X, verbose=0), fresh)
        np.testing.assert_allclose(function(X), model.predict(X, verbose=0), atol=1e-6)


def test_a_part_that_has_predicted_reads_what_moves_to_new_variables() -> None:
    model, _ = plain_fit(lambda: compiled(stack(*map(keras.layers.Dense, (3, 1)))), X, Y)
    model.run_eagerly = False
    part = keras.Model(model.inputs, model.layers[0].output)
    before = part.predict(X, verbose=0)
    tfd.distribute(model, strategy_of("central_storage")).fit(X, Y, **FIT)
    fresh = keras.Model(model.inputs, model.layers[0].output).predict(X, verbose=0)
    assert abs(fresh - before).max() > 1e-3
    np.testing.assert_array_equal(part.predict(X, verbose=0), fresh)


class MovesAway(keras.callbacks.Callback):
    def __init__(self, move: Any) -> None:
        super().__init__()
        self.move = move

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.move(self.model)


def test_a_model_that_moves_during_its_training_is_an_error() -> None:
    def again(model: Any) -> None:
        tfd.distribute(model, mirrored(3))

    def with_shared_layers(model: Any) -> None:
        tfd.distribute(keras.Sequential([*model.layers]), mirrored(3))

    idle = r"distribute\(\) was called while.*before or after fit\(\)\.\nHelp:"
    for move, message in ((again, idle), (with_shared_layers, "moved")):
        model = tfd.distribute(sequential, mirrored())
        with pytest.raises(tfd.TrainingError, match=message):
            model.fit(X, Y, epochs=2, callbacks=[MovesAway(move)], **FIT)


class Registry(keras.Model):
    names: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registry.names[kind] = cls


class Twin(Registry, kind="twin"):
    def __init__(self, units: int = 1) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)

    def twin(self) -> keras.Model:
        return type(self)(2)

    @staticmethod
    def save_name(name: str) -> str:
        return name


def test_the_inserted_class_is_not_seen_by_the_users_code() -> None:
    model = tfd.distribute(Twin(), mirrored())
    assert Registry.names == {"twin": Twin}
    assert type(model.twin()) is Twin
    assert model.twin().dense.units == 2
    assert model.save_name("a") == Twin.save_name("a") == "a"


def test_a_distribute_that_fails_leaves_the_model_as_it_was() -> None:
    model = compiled(stack(keras.layers.BatchNormalization(), keras.layers.Dense(1)))
    with pytest.raises(UserWarning, match="BatchNormalization is not synchronized"):
        tfd.distribute(model, mirrored())  # warnings are errors here
    assert type(model) is keras.Sequential
    model.fit(X, Y, **FIT)


def test_functions_that_are_never_called_are_named() -> None:
    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> None:
            raise AssertionError

    with pytest.warns(UserWarning, match=r"Own\.make_train_function is not called"):
        tfd.distribute(
            lambda: compiled(Own([keras.Input((5,)), keras.layers.Dense(1)])), mirrored()
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_of_saved_models_cannot_move(tmp_path: Path) -> None:
    stack(keras.layers.Dense(1)).export(tmp_path / "exported", verbose=False)
    inputs = keras.Input((5,))
    layer = keras.layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve", trainable=True)
    with pytest.raises(tfd.TrainingError, match="a TFSMLayer, whose variables cannot move"):
        tfd.distribute(compiled(keras.Model(inputs, layer(inputs))), mirrored())
