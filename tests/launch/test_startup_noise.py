"""What TensorFlow writes at every start stays from the screen, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist_ext.launch.lines import StartupNoise

pytestmark = pytest.mark.timeout(60)

GLOG = "I0000 00:00:1795702528.736741    2947 "
ONEDNN = (
    "port.cc:153] oneDNN custom operations are on. You may see slightly different numerical results"
    " due to floating-point round-off errors from different computation orders. To turn them off,"
    " set the environment variable `TF_ENABLE_ONEDNN_OPTS=0`."
)
ABSL = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
OPTIONS = (
    f"{GLOG}eager_service_impl.cc:355] SessionOptions: goo.gle/debugstr  ",
    "device_count {",
    '  key: "CPU"',
    "  value: 1",
    "}",
    "allow_soft_placement: true",
    "",
)


@pytest.mark.parametrize(
    "lines",
    [
        [ABSL],
        [GLOG + ONEDNN],
        [
            f"{GLOG}cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available"
            " CPU instructions in performance-critical operations.",
            "To enable the following instructions: AVX2 AVX512_BF16 FMA, in other operations,"
            " rebuild TensorFlow with the appropriate compiler flags.",
        ],
        [
            f"E{GLOG[1:]}cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed"
            " call to cuInit: UNKNOWN ERROR (303)"
        ],
        [
            f"{GLOG}coordination_service.cc:502] Waiting for 2/3 tasks to connect.",
            f"{GLOG}coordination_service.cc:505] Example stragglers:",
            "/job:worker/replica:0/task:1",
            "/job:worker/replica:0/task:2",
        ],
        OPTIONS,
    ],
)
def test_what_tensorflow_writes_at_every_start_is_known(lines: list[str]) -> None:
    noise = StartupNoise()
    assert [noise.has(line) for line in lines] == [True] * len(lines)


@pytest.mark.parametrize(
    "lines",
    [
        [""],
        [f"I have read: {ONEDNN}"],
        # A GPU that does not work is no noise.
        [
            f"E{GLOG[1:]}cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed"
            " call to cuInit: CUDA_ERROR_UNKNOWN: unknown error"
        ],
        [f"W{GLOG[1:]}coordination_service.cc:502] a task is late"],
        ["device_count {", '  key: "CPU"'],
    ],
)
def test_what_only_looks_like_it_is_shown(lines: list[str]) -> None:
    noise = StartupNoise()
    assert [noise.has(line) for line in lines] == [False] * len(lines)


def test_what_follows_a_line_of_it_is_shown_again() -> None:
    noise = StartupNoise()
    lines = [*OPTIONS, "loss: 0.5", "", ABSL, "/job:worker/replica:0/task:1", *OPTIONS[:2], "Hi!"]
    assert [line for line in lines if not noise.has(line)] == [
        "loss: 0.5",
        "",
        "/job:worker/replica:0/task:1",
        "Hi!",
    ]


def test_a_run_does_not_show_it(run_tasks, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(f"{ABSL}\n{GLOG}{ONEDNN}\nEpoch 1/2 uses oneDNN\n")
    ran = run_tasks({"worker:0": f"cat {text}; kill -9 $$"}, log_dir=tmp_path)
    assert ran.lines("worker:0") == ["Epoch 1/2 uses oneDNN"]
    assert ran.result.last_lines == {"worker:0": ("Epoch 1/2 uses oneDNN",)}
    assert (tmp_path / "worker-0.log").read_text() == text.read_text()
