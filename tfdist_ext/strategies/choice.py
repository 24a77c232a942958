"""Which strategy `auto` means, from what is there: a pure function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist_ext.strategies.resolvers import Described

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """Which strategy was chosen, and what was known then.

    Attributes:
        name: of the strategy, as `create_strategy` takes it.
        because: the signal that led to it.
        passed_over: a line for each alternative that was not taken, with the reason.
        settings: a line for each setting, with where it came from.
        cluster: the one that the strategy is of; None where it is of one machine.
        apart: asked for without the cluster that the environment describes.
    """

    name: str
    because: str
    passed_over: list[str] = field(default_factory=list)
    settings: tuple[str, ...] = ()
    cluster: Described | None = None
    apart: bool = False


def choose(
    *,
    cluster_jobs: Collection[str] | None,
    cluster_source: str,
    tpu: str | None,
    devices: Callable[[], Sequence[str]],
    asked_for: int | None = None,
    alone: str = "no cluster",
) -> Choice:
    """Take the most specific signal: a cluster, then a TPU, then this machine's devices.

    Args:
        cluster_jobs: the jobs of the cluster given or found, None without one.
        cluster_source: where the cluster came from.
        tpu: the name of a TPU, None without one.
        devices: asked last, because listing devices starts TensorFlow: names like "GPU:0".
        asked_for: how many devices `devices=` asks for, None where it was not given.
        alone: why this process trains by itself, where `cluster_jobs` is None.
    """
    passed_over = []
    if cluster_jobs is not None:
        jobs = ", ".join(cluster_jobs)
        if "ps" in cluster_jobs:
            return Choice("parameter_server", f"{cluster_source} has ps tasks ({jobs})")
        passed_over.append("parameter_server: the cluster has no ps tasks")
        because = f"{cluster_source} describes a cluster ({jobs})"
        return Choice("multi_worker_mirrored", because, passed_over)
    passed_over.append(f"multi_worker_mirrored, parameter_server: {alone}")
    if asked_for is not None:
        # devices= speaks of this machine, whatever TPU the environment names.
        because = f"devices= asks for {asked_for} on this machine, {alone}"
        if tpu is not None:
            passed_over.append(f"tpu: the environment names {tpu!r}, but devices= was given")
        return Choice("mirrored" if asked_for > 1 else "one_device", because, passed_over)
    if tpu is not None:
        return Choice("tpu", f"the environment names the TPU {tpu!r}", passed_over)
    passed_over.append("tpu: no TPU is named")
    seen = devices()
    gpus, cpus = (sum(name.startswith(kind) for name in seen) for kind in ("GPU:", "CPU:"))
    if gpus > 1:
        return Choice("mirrored", f"{gpus} GPUs on this machine, {alone}", passed_over)
    if gpus:
        passed_over.append("mirrored: one GPU only")
        return Choice("one_device", f"one GPU on this machine, {alone}", passed_over)
    passed_over.append("mirrored on GPUs: there are none")
    if cpus > 1:
        return Choice("mirrored", f"{cpus} logical CPUs on this machine, {alone}", passed_over)
    passed_over.append("mirrored on CPUs: one logical CPU only")
    return Choice("default", f"one CPU on this machine, {alone}", passed_over)
