"""Bytes on each device under each strategy, before any of them is paid for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, counted
from tfdist_ext.placement.planning import plan
from tfdist_ext.placement.report import columns
from tfdist_ext.placement.rules import Owned
from tfdist_ext.placement.sizes import size_text
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.user_frames import filter_traceback

__all__ = ["Comparison", "Footprint", "compare"]


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model on one device, without activations and buffers of the runtime.

    Attributes:
        strategy: its name.
        device: what the bytes are on, for example "each device" or "host".
        weights: bytes of variables without slots.
        gradients: bytes of one gradient of each trainable variable. The gradient of an embedding
            has a row for each lookup of the step.
        slots: bytes of optimizer slots.
    """

    strategy: str
    device: str
    weights: int
    gradients: int
    slots: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.slots


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; `str()` of it is a table.

    Attributes:
        rows: bytes for each strategy and device.
        embeddings: number of trained embeddings.
        lookups: ids that a step looks up in each embedding.
    """

    rows: tuple[Footprint, ...]
    embeddings: int
    lookups: int

    def __str__(self) -> str:
        lines = [["strategy", "on", "weights", "gradients", "slots", "total"]]
        for row in self.rows:
            sizes = (row.weights, row.gradients, row.slots, row.total)
            lines.append([row.strategy, row.device, *map(size_text, sizes)])
        table = columns(lines, left=2)
        if not self.embeddings:
            return table
        return (
            f"{table}\n\nThe gradient of an embedding has a row for each id that a step looks up:"
            f" {self.lookups} in each of {counted(self.embeddings, 'embedding')} (--lookups)."
        )


@filter_traceback
def compare(
    specs: Iterable[VariableSpec], devices: int, ps: int, lookups: int = 1024
) -> Comparison:
    """Weights, gradients and slots on each device, strategy by strategy.

    Args:
        specs: the variables of the model, with the slots of its optimizer.
        devices: replicas: devices of one machine, or workers beside parameter servers.
        ps: parameter servers; 0 leaves them out.
        lookups: ids that a step looks up in each embedding: the global batch size, times the ids
            in one example.

    Raises:
        PlacementError: no whole numbers, or no devices.
    """
    check_int(devices, "devices", 1, error=PlacementError)
    check_int(ps, "ps", error=PlacementError)
    check_int(lookups, "lookups", 1, error=PlacementError)
    variables = tuple(specs)
    weights = sum(spec.weight_bytes for spec in variables)
    slots = sum(spec.bytes for spec in variables) - weights
    gradients = sum(spec.gradient_bytes(lookups) for spec in variables)
    owned = plan(variables, devices=[f"GPU:{i}" for i in range(devices)], default=lambda _: Owned())
    of_owner = max(owned.bytes_by_task) - weights  # slots are whole variables', not even shares
    rows = [
        Footprint("mirrored", "each device", weights, gradients, slots),
        Footprint("central_storage", "host", weights, 0, slots),
        Footprint("central_storage", "each device", 0, gradients, 0),
        Footprint("placed", "fullest device", weights, gradients, of_owner),
    ]
    if ps:
        made = plan(variables, ps)
        fullest = max(made.bytes_by_task)
        task = made.bytes_by_task.index(fullest)
        weights_there = sum(
            spec.weight_bytes // spec.rows * (shard.stop - shard.start)
            for spec in made.specs
            for shard in made.shards_of(spec.path)
            if shard.task == task and spec.rows
        )
        rows += [
            Footprint("parameter_server", "fullest ps", weights_there, 0, fullest - weights_there),
            Footprint("parameter_server", "each worker", 0, gradients, 0),
        ]
    embeddings = sum(spec.embedding and spec.trainable for spec in variables)
    return Comparison(tuple(rows), embeddings, lookups)
