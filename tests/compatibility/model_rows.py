"""The models of the table: each a function that builds it, its data, and what it says of itself.

Tiny configurations of real families: every kind of layer and step, few numbers. KerasHub and
KerasRS are imported when a model is built, so that the list can be read without them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import guide_models
import keras
import numpy as np
from two_steps import BATCH

import tfdist_ext as tfd
from tfdist_ext.training.verify import Trainings

ROWS = 8
CLASSES = 3
WORDS = 50
LENGTH = 8


class Row(NamedTuple):
    """A model of the table.

    Attributes:
        group: the package, or the guide, that it comes from.
        name: in the group.
        build: makes the compiled model.
        data: makes what `fit` is given, with `ROWS` rows.
        lines: of the user's that are changed.
        float64: it can be computed in float64; else its differences are those of float32.
        callbacks: makes those that `fit` is given.
        reason: why it differs from one device, where it does.
        on_clusters: it may be trained on workers and on parameter servers, too.
    """

    group: str
    name: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    lines: int = 1
    float64: bool = True
    callbacks: Callable[[], list[Any]] = list
    reason: str = ""
    on_clusters: bool = True

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name}"

    def trainings(self, timer: Any) -> Any:
        """Returns the trainings of two steps, which `tfd.verify` compares."""
        data, callbacks = self.data(), [*self.callbacks(), timer]
        arrays = tuple(data[name] for name in ("x", "y", "sample_weight") if name in data)
        fit = {"batch_size": BATCH, "epochs": data.get("epochs", 1), "callbacks": callbacks}
        return Trainings(timer, arrays, 2, synchronize_batch_norm=True, **fit)


def rows() -> dict[str, Row]:
    """All models, by title."""
    hub = [hub_text(name, config) for name, config in TEXTS.items()]
    hub += [hub_image(name, config) for name, config in IMAGES.items()]
    models = [*applications(), *hub, *recommenders(), *guides()]
    return {row.title: row for row in models}


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def classes() -> np.ndarray:
    return random(1).integers(0, CLASSES, ROWS)


def compiled(model: Any, loss: str = "sparse_categorical_crossentropy", **settings: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False, **settings)
    return model


def classifier(inputs: Any, x: Any) -> Any:
    """A compiled model whose last layer gives the classes."""
    return compiled(keras.Model(inputs, keras.layers.Dense(CLASSES, activation="softmax")(x)))


# keras.applications

HUGE = {"ConvNeXtLarge", "ConvNeXtXLarge"}  # too large for three copies in float64
# Smallest sizes that are not 32. Some are larger: at 32 their BatchNormalization divides by the
# deviations of a few pixels, and the last bit of the inputs makes up to 2.0 in Keras itself.
SIZES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}
SIZES |= {f"EfficientNetV2{name}": 64 for name in ("B0", "B1", "B2", "B3", "S", "M", "L")}
SIZES |= {f"EfficientNetB{number}": 64 for number in (5, 6, 7)}


def applications() -> list[Row]:
    modules = [getattr(keras.applications, name) for name in dir(keras.applications)]
    names = sorted({name for module in modules for name in dir(module) if name[0].isupper()})
    return [application(name, SIZES.get(name, 32)) for name in names]


def application(name: str, size: int) -> Row:
    def build() -> Any:
        make = getattr(keras.applications, name)
        return compiled(make(weights=None, input_shape=(size, size, 3), classes=CLASSES))

    data = functools.partial(images, size)
    return Row("keras.applications", name, build, data, float64=name not in HUGE)


def images(size: int) -> dict[str, Any]:
    return {"x": random().uniform(-1, 1, (ROWS, size, size, 3)), "y": classes()}


def vectors() -> dict[str, Any]:
    return {"x": random().normal(size=(ROWS, 6)), "y": classes()}


# KerasHub

# Each backbone gets the sizes that it takes, by the names that it has for them.
DIMENSIONS = {
    "vocabulary_size": WORDS,
    "vocab_size": WORDS,
    "max_sequence_length": LENGTH,
    "num_layers": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "mlp_dim": 16,
    "patch_size": 8,
}
# Backbone -> what else it gets.
TEXTS: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_dim": 4},
    "Bart": {},
    "Bert": {},
    "Bloom": {},
    "DebertaV3": {"bucket_size": 4},
    "DistilBert": {},
    "Electra": {"embedding_dim": 8},
    "ESM2": {},
    "Falcon": {},
    "FNet": {},
    "Gemma": {"head_dim": 4},
    "Gemma3": {"head_dim": 4, "image_size": None, "vision_encoder": None},
    "GPT2": {},
    "GPTNeoX": {"hidden_dim": 16},
    "Llama": {},
    "Llama3": {},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_experts": 2, "top_k": 1},
    "OPT": {},
    "Phi3": {},
    "Qwen": {},
    "Qwen3": {"head_dim": 4},
    "Roberta": {},
    "RoformerV2": {"head_size": 4},
    "SmolLM3": {
        "hidden_dim": 16,
        "attention_bias": False,
        "attention_dropout": 0.1,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["full_attention"] * 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": LENGTH,
        "rope_theta": 100.0,
        "partial_rotary_factor": 1.0,
    },
    "T5": {},
    "XLMRoberta": {},
    "XLNet": {},
}


FLOAT32 = {"Mixtral", "T5"}  # their layers mix precisions
REASONS = {
    "Mixtral": "the loss that balances the experts multiplies means over the batch; each replica"
    " computes the means of its own rows",
    "XLNet": "KerasHub reshapes (rows, words) to (words, rows) instead of transposing, so the"
    " model mixes rows; each replica mixes only its own rows",
}


def hub_text(name: str, config: dict[str, Any]) -> Row:
    build = functools.partial(hub_classifier, name, config)

    def data() -> dict[str, Any]:
        inputs = [one.name for one in build().inputs]
        return {"x": {name: of_text(name) for name in inputs}, "y": classes()}

    reason = REASONS.get(name, "")
    return Row("KerasHub", name, build, data, float64=name not in FLOAT32, reason=reason)


def of_text(name: str) -> np.ndarray:
    if "mask" in name:  # texts of different lengths
        return (np.arange(LENGTH) < random(2).integers(3, LENGTH + 1, (ROWS, 1))).astype("int32")
    if "segment" in name:
        return np.zeros((ROWS, LENGTH), "int32")
    return random(3).integers(1, WORDS, (ROWS, LENGTH))


def hub_classifier(name: str, config: dict[str, Any]) -> Any:
    """A backbone as a classifier: the mean of its last output's entries, and a dense layer."""
    import keras_hub

    make = getattr(keras_hub.models, f"{name}Backbone")
    takes = inspect.signature(make.__init__).parameters
    sizes = {size: value for size, value in DIMENSIONS.items() if size in takes}
    backbone = make(**{**sizes, **config})
    output = backbone.output
    if isinstance(output, dict):
        names = [name for name in output if name.endswith("sequence_output")]
        output = output[names[-1]] if names else list(output.values())[-1]
    if isinstance(output, list | tuple):
        output = output[-1]
    mean = keras.layers.Lambda(lambda x: keras.ops.mean(x, axis=tuple(range(1, x.ndim - 1))))
    x = mean(output) if len(output.shape) > 2 else output
    return classifier(backbone.inputs, x)


IMAGES: dict[str, dict[str, Any]] = {
    "CSPNet": {
        "stem_filters": 4,
        "stem_kernel_size": 3,
        "stem_strides": 2,
        "stackwise_depth": [1, 1],
        "stackwise_strides": [1, 2],
        "stackwise_num_filters": [8, 8],
        "block_type": "dark_block",
        "stage_type": "csp",
        "expand_ratio": [2.0],
        "image_shape": (32, 32, 3),
    },
    "DenseNet": {"stackwise_num_repeats": [1, 1], "compression_ratio": 0.5, "growth_rate": 4},
    "DeiT": {"image_shape": (16, 16, 3), "dropout_rate": 0.1, "attention_dropout": 0.1},
    "MiT": {
        "layerwise_depths": [1, 1],
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.2,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [4, 8],
        "image_shape": (32, 32, 3),
    },
    "ResNet": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 128],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
        "image_shape": (32, 32, 3),
    },
    "SwinTransformer": {
        "image_shape": (32, 32, 3),
        "patch_size": 4,
        "embed_dim": 8,
        "window_size": 2,
        "depths": (1, 1),
        "num_heads": (2, 2),
    },
    "VGG": {
        "stackwise_num_repeats": [1, 1],
        "stackwise_num_filters": [4, 8],
        "image_shape": (32, 32, 3),
    },
    "ViT": {"image_shape": (16, 16, 3), "dropout_rate": 0.1, "attention_dropout": 0.1},
    "Xception": {
        "stackwise_conv_filters": [[4, 4], [8, 8]],
        "stackwise_pooling": [True, False],
        "image_shape": (32, 32, 3),
    },
}


def hub_image(name: str, config: dict[str, Any]) -> Row:
    build = functools.partial(hub_classifier, name, config)
    size = config.get("image_shape", (32, 32, 3))[0]
    return Row("KerasHub", name, build, functools.partial(images, size))


# KerasRS


def recommenders() -> list[Row]:
    """Every layer, loss and metric of KerasRS."""
    losses = ["ListMLELoss", "PairwiseHingeLoss", "PairwiseLogisticLoss"]
    losses += ["PairwiseMeanSquaredError", "PairwiseSoftZeroOneLoss"]
    models = [Row("KerasRS", name, functools.partial(ranking, name), lists) for name in losses]
    models += [
        Row("KerasRS", "FeatureCross", deep_and_cross, vectors),
        Row("KerasRS", "DotInteraction", dot_interaction, features),
        Row("KerasRS", "EmbedReduce", embed_reduce, baskets),
        Row("KerasRS", "DistributedEmbedding", distributed_embedding, named_features),
        Row("KerasRS", "Retrieval with in-batch negatives", retrieval, pairs, lines=3),
        Row("KerasRS", "BruteForceRetrieval in a model", brute_force, vectors),
    ]
    return models


def ranking(loss: str) -> Any:
    """Scores of 5 items of a list, with all metrics of ranking."""
    import keras_rs

    names = ["DCG", "MeanAveragePrecision", "MeanReciprocalRank", "NDCG"]
    names += ["PrecisionAtK", "RecallAtK"]
    metrics = [getattr(keras_rs.metrics, name)(k=3, shuffle_ties=False) for name in names]
    model = keras.Sequential([keras.Input((5, 4)), keras.layers.Dense(8, activation="tanh")])
    model.add(keras.layers.Dropout(0.2))
    model.add(keras.layers.Dense(1))
    model.add(keras.layers.Flatten())
    return compiled(model, getattr(keras_rs.losses, loss)(), metrics=metrics)


def lists() -> dict[str, Any]:
    return {"x": random().normal(size=(ROWS, 5, 4)), "y": random(1).integers(0, 3, (ROWS, 5))}


def deep_and_cross() -> Any:
    import keras_rs

    inputs = keras.Input((6,))
    crossed = keras_rs.layers.FeatureCross(projection_dim=3)(inputs)
    crossed = keras_rs.layers.FeatureCross()(inputs, crossed)
    return classifier(inputs, crossed)


def dot_interaction() -> Any:
    import keras_rs

    inputs = [keras.Input((1,), dtype="int32") for _ in range(3)]
    rows = [keras.layers.Flatten()(keras.layers.Embedding(WORDS, 4)(ids)) for ids in inputs]
    x = keras_rs.layers.DotInteraction()(rows)
    return classifier(inputs, x)


def features() -> dict[str, Any]:
    ids = random().integers(0, WORDS, (3, ROWS, 1))
    return {"x": list(ids), "y": classes()}


def embed_reduce() -> Any:
    import keras_rs

    inputs = keras.Input((4,), dtype="int32")
    x = keras_rs.layers.EmbedReduce(WORDS, 6, combiner="mean")(inputs)
    return classifier(inputs, x)


def baskets() -> dict[str, Any]:
    return {"x": random().integers(0, WORDS, (ROWS, 4)), "y": classes()}


def distributed_embedding() -> Any:
    import keras_rs

    layers = keras_rs.layers
    table = layers.TableConfig("items", WORDS, 6, optimizer="sgd", placement="default_device")
    configs = {name: layers.FeatureConfig(name, table, (None, 4), (None, 6)) for name in ("a", "b")}
    inputs = {name: keras.Input((4,), dtype="int32", name=name) for name in configs}
    embedded = layers.DistributedEmbedding(configs)(inputs)
    x = keras.layers.Concatenate()([embedded["a"], embedded["b"]])
    return classifier(inputs, x)


def named_features() -> dict[str, Any]:
    ids = random().integers(0, WORDS, (2, ROWS, 4))
    return {"x": {"a": ids[0], "b": ids[1]}, "y": classes()}


def retrieval() -> Any:
    """Two towers, the other rows of the batch as negatives: two lines more for their rows."""
    import keras_rs

    ops, layers = keras.ops, keras_rs.layers

    class Towers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.queries = keras.layers.Embedding(WORDS, 6)
            self.items = keras.layers.Embedding(WORDS, 6)
            self.correct = layers.SamplingProbabilityCorrection()
            self.remove = layers.RemoveAccidentalHits()
            self.mine = layers.HardNegativeMining(2)

        def call(self, x: Any) -> Any:
            return self.queries(x["query"])

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **settings: Any) -> Any:
            query, item = self.queries(x["query"]), self.items(x["item"])
            item, ids = tfd.all_rows((item, x["item"]))
            query, often = tfd.all_rows((query, x["often"]))
            logits = ops.matmul(query, ops.transpose(item))
            labels = ops.eye(ops.shape(query)[0])
            logits = self.correct(logits, often)
            logits = self.remove(logits, labels, ids)
            logits, labels = self.mine(logits, labels)
            return keras.losses.CategoricalCrossentropy(from_logits=True)(labels, logits)

    model = Towers()
    model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    return model


def pairs() -> dict[str, Any]:
    query, item = random().integers(0, WORDS, (2, ROWS))
    return {"x": {"query": query, "item": item, "often": random(1).uniform(0.1, 1, ROWS)}}


def brute_force() -> Any:
    import keras_rs

    inputs = keras.Input((6,))
    query = keras.layers.Dense(4)(inputs)
    table = random().normal(size=(10, 4))
    scores, _ = keras_rs.layers.BruteForceRetrieval(table, k=CLASSES)(query)
    return compiled(keras.Model(inputs, keras.layers.Softmax()(scores)))


# Keras's guides, and KerasTuner


class Search(Row):
    """A search: what comes out are the scores of its trials."""

    def trainings(self, timer: Any) -> Any:
        return guide_models.Searches(timer)


def guides() -> list[Row]:
    rows_of_guides = [
        Row("guides", name, build, data, lines, callbacks=callbacks)
        for name, build, data, lines, callbacks in guide_models.GUIDES
    ]
    tuner = Search("KerasTuner", "GridSearch", lambda: None, dict, lines=1, on_clusters=False)
    return [*rows_of_guides, tuner]
