"""The memory of a process, from Linux."""

from pathlib import Path

__all__ = ["mebibytes", "reset_peak"]


def mebibytes(field: str, process: int | str = "self") -> float:
    """VmRSS is now, VmHWM the most since the last reset."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def reset_peak(process: int | str = "self") -> None:
    Path(f"/proc/{process}/clear_refs").write_text("5")
