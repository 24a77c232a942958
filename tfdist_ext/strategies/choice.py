"""Which strategy `auto` means, from what is there: a pure function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """Which strategy `auto` takes.

    Attributes:
        name: of the strategy.
        because: the signal that led to it.
        passed_over: a line for each alternative that was not taken, with the reason.
    """

    name: str
    because: str
    passed_over: list[str] = field(default_factory=list)


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
    for kind in ("GPU", "CPU"):
        found = [name for name in seen if name.startswith(f"{kind}:")]
        if len(found) > 1:
            logical = "logical " if kind == "CPU" else ""
            because = f"{len(found)} {logical}{kind}s on this machine, {alone}"
            return Choice("mirrored", because, passed_over)
        if kind == "GPU" and found:
            passed_over.append("mirrored: one GPU only")
            return Choice("one_device", f"one GPU on this machine, {alone}", passed_over)
        if kind == "GPU":
            passed_over.append("mirrored on GPUs: there are none")
    passed_over.append("mirrored on CPUs: one logical CPU only")
    return Choice("default", f"one CPU on this machine, {alone}", passed_over)
