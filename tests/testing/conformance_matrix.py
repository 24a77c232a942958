"""Every strategy that the tests and `scripts/figures/conformance` run the conformance kit on."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.strategies import PlacedStrategy, StrategyTemplate
from tfdist_ext.testing import StrategyConformance

PAGE = Path(__file__).parents[2] / "docs" / "custom_strategy.md"


def devices(count: int) -> list[str]:
    return [f"CPU:{number}" for number in range(count)]


# Rows of docs/tensorflow_facts.md, by their beginning.
FACTS = "docs/tensorflow_facts.md: {}"
OUTER_TENSOR = FACTS.format(
    "In eager code, `all_reduce` of a tensor made outside of `strategy.run` counts the tensor once"
)


class OuterTensor(StrategyConformance):
    """TensorFlow's own strategies fail one check."""

    @pytest.mark.xfail(strict=True, reason=OUTER_TENSOR)
    def test_all_reduce_of_a_captured_tensor(self) -> None:
        super().test_all_reduce_of_a_captured_tensor()


class Mirrored(OuterTensor):
    def strategy(self) -> tf.distribute.Strategy:
        # The default operations fail on CPUs in loops in the graph.
        operations = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(devices(2), cross_device_ops=operations)


class CentralStorage(OuterTensor):
    def strategy(self) -> tf.distribute.Strategy:
        return tfd.create_strategy("central_storage", devices=devices(3))


class OneDevice(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return tf.distribute.OneDeviceStrategy("CPU:0")


class Template(StrategyConformance):
    def strategy(self) -> tf.distribute.Strategy:
        return StrategyTemplate(3)


class Placed(StrategyConformance):
    """Tables and biases on the host alone, what else is trained is owned, the rest mirrored."""

    def strategy(self) -> tf.distribute.Strategy:
        return PlacedStrategy(3, {".*(embeddings|bias)": "device CPU:0"}, owned_from=1)


def defined_on_the_page() -> dict[str, Any]:
    """The classes and functions of docs/custom_strategy.md, without what it does with them."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
    body = [node for node in ast.parse("\n".join(blocks)).body if isinstance(node, kinds)]
    names: dict[str, Any] = {"__name__": PAGE.name}
    exec(compile(ast.Module(body, []), PAGE.name, "exec"), names)
    return names


Frugal: type[StrategyConformance] = defined_on_the_page()["TestFrugal"]

# Title in the table -> its conformance test.
MATRIX: dict[str, type[StrategyConformance]] = {
    "MirroredStrategy": Mirrored,
    "CentralStorageStrategy": CentralStorage,
    "OneDeviceStrategy": OneDevice,
    "StrategyTemplate": Template,
    "PlacedStrategy": Placed,
    "Frugal, of this page": Frugal,
}
