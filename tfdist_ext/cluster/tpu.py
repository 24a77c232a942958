"""A TPU that the environment names. It is reached through its own resolver: no ClusterConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfdist_ext.messages import shown

NAME = "TPU"


@dataclass(frozen=True)
class TpuSignal:
    """The TPU to use; zone and project are None where the machine's own are meant.

    Attributes:
        name: the name or address of the TPU; "local" on a TPU VM.
        zone: its Google Cloud zone, for example "us-central1-b".
        project: its Google Cloud project.
        source: where this came from, in a few words.
    """

    name: str
    zone: str | None = None
    project: str | None = None
    source: str = "TPU_NAME"


def detect(env: Mapping[str, str]) -> TpuSignal | None:
    """The TPU that TPU_NAME names (with TPU_ZONE and TPU_PROJECT), or None where it is not set."""
    name = env.get("TPU_NAME", "").strip()
    if not name:
        return None
    zone, project = (env.get(key, "").strip() or None for key in ("TPU_ZONE", "TPU_PROJECT"))
    return TpuSignal(name, zone, project, source=f"TPU_NAME={shown(name)}")


def describe(env: Mapping[str, str]) -> str:
    """One line for `describe_environments`."""
    signal = detect(env)
    return "TPU_NAME is not set" if signal is None else f"TPU {shown(signal.name)}"
