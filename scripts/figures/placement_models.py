"""The variables of known models: path, shape and optimizer slots.

Shapes are those of keras.applications (scripts/figures/placement_report learns them from the models
themselves), of BERT-large, and of DLRM on the 26 categories of the Criteo Kaggle data.
scripts/figures/placement_report and tests/placement use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tfdist_ext.placement import VariableSpec

Named = Iterator[tuple[str, tuple[int, ...]]]

# Values of each category: what DLRM's authors publish for the Kaggle data set.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def resnet50(slots: int = 2) -> list[VariableSpec]:
    """25,636,712 parameters."""

    def named() -> Named:
        yield from _convolution("conv1_conv", 7, 3, 64)
        yield from _normalization("conv1_bn", 64)
        inputs = 64
        for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
            for block in range(1, blocks + 1):
                name = f"conv{stage}_block{block}"
                for part, size, width_in in ((1, 1, inputs), (2, 3, width)):
                    yield from _convolution(f"{name}_{part}_conv", size, width_in, width)
                    yield from _normalization(f"{name}_{part}_bn", width)
                ends = ((0, inputs),) * (block == 1) + ((3, width),)
                for part, width_in in ends:
                    yield from _convolution(f"{name}_{part}_conv", 1, width_in, 4 * width)
                for part, _ in ends:
                    yield from _normalization(f"{name}_{part}_bn", 4 * width)
                inputs = 4 * width
        yield from _dense("predictions", 2048, 1000)

    return _specs(named(), slots)


def mobilenet_v2(slots: int = 2) -> list[VariableSpec]:
    """3,538,984 parameters."""
    stages = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))

    def named() -> Named:
        yield "Conv1/kernel", (3, 3, 3, 32)
        yield from _normalization("bn_Conv1", 32)
        inputs, number = 32, 0
        for expansion, outputs, blocks in stages:
            for _ in range(blocks):
                name = f"block_{number}" if number else "expanded_conv"
                width = inputs * expansion
                if number:
                    yield f"{name}_expand/kernel", (1, 1, inputs, width)
                    yield from _normalization(f"{name}_expand_BN", width)
                yield f"{name}_depthwise/kernel", (3, 3, width, 1)
                yield from _normalization(f"{name}_depthwise_BN", width)
                yield f"{name}_project/kernel", (1, 1, width, outputs)
                yield from _normalization(f"{name}_project_BN", outputs)
                inputs, number = outputs, number + 1
        yield "Conv_1/kernel", (1, 1, 320, 1280)
        yield from _normalization("Conv_1_bn", 1280)
        yield from _dense("predictions", 1280, 1000)

    return _specs(named(), slots)


def efficientnet_b0(slots: int = 2) -> list[VariableSpec]:
    """5,330,564 parameters.

    Left out are 7 numbers of the layer that normalizes images, and the seeds of ten dropout layers.
    """
    stages = (
        *((1, 3, 16, 1), (6, 3, 24, 2), (6, 5, 40, 2), (6, 3, 80, 3)),
        *((6, 5, 112, 3), (6, 5, 192, 4), (6, 3, 320, 1)),
    )

    def named() -> Named:
        yield "stem_conv/kernel", (3, 3, 3, 32)
        yield from _normalization("stem_bn", 32)
        inputs = 32
        for stage, (expansion, size, outputs, blocks) in enumerate(stages, start=1):
            for block in range(blocks):
                name = f"block{stage}{'abcd'[block]}"
                width, squeezed = inputs * expansion, inputs // 4
                if expansion > 1:
                    yield f"{name}_expand_conv/kernel", (1, 1, inputs, width)
                    yield from _normalization(f"{name}_expand_bn", width)
                yield f"{name}_dwconv/kernel", (size, size, width, 1)
                yield from _normalization(f"{name}_bn", width)
                yield from _convolution(f"{name}_se_reduce", 1, width, squeezed)
                yield from _convolution(f"{name}_se_expand", 1, squeezed, width)
                yield f"{name}_project_conv/kernel", (1, 1, width, outputs)
                yield from _normalization(f"{name}_project_bn", outputs)
                inputs = outputs
        yield "top_conv/kernel", (1, 1, 320, 1280)
        yield from _normalization("top_bn", 1280)
        yield from _dense("predictions", 1280, 1000)

    return _specs(named(), slots)


def bert_large(slots: int = 2) -> list[VariableSpec]:
    """335,141,888 parameters, with the pooler and without heads."""

    def named() -> Named:
        for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
            yield f"embeddings/{name}_embeddings/embeddings", (rows, 1024)
        yield from _scale("embeddings/layer_norm", 1024)
        for layer in range(24):
            name = f"encoder/layer_{layer}"
            for part in ("query", "key", "value", "output"):
                yield from _dense(f"{name}/attention/{part}", 1024, 1024)
            yield from _scale(f"{name}/attention/layer_norm", 1024)
            yield from _dense(f"{name}/intermediate", 1024, 4096)
            yield from _dense(f"{name}/output", 4096, 1024)
            yield from _scale(f"{name}/layer_norm", 1024)
        yield from _dense("pooler", 1024, 1024)

    return _specs(named(), slots)


def criteo_tables(slots: int = 2) -> list[VariableSpec]:
    """26 embedding tables of width 16, 33,762,577 rows, one lookup in each for an example."""
    return [
        VariableSpec(f"table_{number}/embeddings", (rows, 16), slots=slots)
        for number, rows in enumerate(CRITEO_ROWS)
    ]


MODELS: dict[str, Callable[..., list[VariableSpec]]] = {
    "ResNet-50": resnet50,
    "MobileNetV2": mobilenet_v2,
    "EfficientNetB0": efficientnet_b0,
    "BERT-large": bert_large,
    "26 Criteo tables": criteo_tables,
}


def many_tables(count: int, loads: bool = False) -> list[VariableSpec]:
    """So many tables, most small and a few very large, as in models of recommendation."""
    chance = np.random.default_rng(7)
    rows = np.exp(chance.normal(8, 2.5, count)).astype(int) + 1
    lookups = chance.pareto(1.2, count) * (chance.random(count) < 0.5)
    return [
        VariableSpec(f"layer_{i}/kernel", (n, 64), slots=2, load=load if loads else None)
        for i, (n, load) in enumerate(zip(rows.tolist(), lookups.tolist(), strict=True))
    ]


def _specs(named: Named, slots: int) -> list[VariableSpec]:
    """With an optimizer's slots on all that is trained: not on moving statistics."""
    return [
        VariableSpec(
            path, shape, slots=slots * ("/moving_" not in path), trainable="/moving_" not in path
        )
        for path, shape in named
    ]


def _convolution(name: str, size: int, inputs: int, outputs: int) -> Named:
    yield f"{name}/kernel", (size, size, inputs, outputs)
    yield f"{name}/bias", (outputs,)


def _dense(name: str, inputs: int, outputs: int) -> Named:
    yield f"{name}/kernel", (inputs, outputs)
    yield f"{name}/bias", (outputs,)


def _scale(name: str, width: int) -> Named:
    yield f"{name}/gamma", (width,)
    yield f"{name}/beta", (width,)


def _normalization(name: str, width: int) -> Named:
    yield from _scale(name, width)
    yield f"{name}/moving_mean", (width,)
    yield f"{name}/moving_variance", (width,)
