"""What TensorFlow writes at every start stays from the screen, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist_ext.launch.lines import is_startup_noise

GLOG = "0000 00:00:1795702528.736741    2947 "
ONEDNN = "port.cc:153] oneDNN custom operations are on. You may see slightly different numerical"
ABSL = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
CUDA = f"E{GLOG}cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call to"


@pytest.mark.parametrize(
    ("line", "is_noise"),
    [
        (ABSL, True),
        (f"I{GLOG}{ONEDNN}", True),
        (f"2026-11-26 12:13:14.567890: I tensorflow/core/util/{ONEDNN}", True),
        (f"I{GLOG}cudart_stub.cc:31] Could not find cuda drivers on your machine", True),
        (f"{CUDA} cuInit: UNKNOWN ERROR (303)", True),
        (f"{CUDA} cuInit: CUDA_ERROR_UNKNOWN: unknown error", False),  # a GPU that does not work
        (f"I have read: {ONEDNN}", False),
        (f"W{GLOG}coordination_service.cc:502] a task is late", False),
        ("", False),
    ],
)
def test_startup_noise(line: str, is_noise: bool) -> None:
    assert is_startup_noise(line) == is_noise


def test_a_run_does_not_show_it(run_tasks, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(f"{ABSL}\nI{GLOG}{ONEDNN}\nEpoch 1/2 uses oneDNN\n")
    ran = run_tasks(
        {"worker:0": f"cat {text}; echo level $TF_CPP_MIN_LOG_LEVEL; kill -9 $$"}, log_dir=tmp_path
    )
    assert ran.lines("worker:0") == ["Epoch 1/2 uses oneDNN", "level 1"]
    assert ran.result.last_lines == {"worker:0": ("Epoch 1/2 uses oneDNN", "level 1")}
    assert (tmp_path / "worker-0.log").read_text() == text.read_text() + "level 1\n"
