"""Bytes on each device under each strategy, before any machine is paid for."""

from __future__ import annotations

from collections.abc import Iterable

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int
from tfdist_ext.placement.planning import plan
from tfdist_ext.placement.rules import Owned
from tfdist_ext.placement.specs import VariableSpec, columns, size_text
from tfdist_ext.user_frames import filter_traceback

__all__ = ["compare"]


@filter_traceback
def compare(specs: Iterable[VariableSpec], devices: int, ps: int) -> str:
    """A table of weights and slots on the devices that hold most of them, for each strategy.

    Gradients are not counted: a replica has at most one number for each trainable weight, and for
    an embedding one row for each lookup of a step. Activations are not counted either.

    Args:
        specs: the variables of the model, with the slots of its optimizer.
        devices: number of replicas on one machine.
        ps: number of parameter servers.

    Raises:
        PlacementError: `devices` or `ps` is not an integer from 1.
    """
    check_int(devices, "devices", 1, error=PlacementError)
    variables = tuple(specs)
    weights = sum(spec.weight_bytes for spec in variables)
    total = sum(spec.bytes for spec in variables)
    owned = plan(variables, devices=[f"GPU:{i}" for i in range(devices)], default=lambda _: Owned())
    servers = plan(variables, ps)
    fullest = max(servers.bytes_by_task)
    task = servers.bytes_by_task.index(fullest)
    on_server = sum(
        spec.weight_bytes // spec.rows * (shard.stop - shard.start)
        for spec in variables
        for shard in servers.shards_of(spec.path)
        if shard.task == task and spec.rows
    )
    lines = [["strategy", "on", "weights", "slots", "total"]]
    for strategy, device, of_weights, of_all in (
        ("mirrored", "each device", weights, total),
        ("central_storage", "host", weights, total),
        ("placed", "fullest device", weights, max(owned.bytes_by_task)),
        ("parameter_server", "fullest ps", on_server, fullest),
    ):
        sizes = (of_weights, of_all - of_weights, of_all)
        lines.append([strategy, device, *map(size_text, sizes)])
    return columns(lines, "<<>>>")
