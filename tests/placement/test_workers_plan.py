"""WorkersPlan: its table, advice and picture, and the published scaling of ResNets beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist_ext.placement import PlacementError
from tfdist_ext.placement.scaling import Network, StepCost, WorkersPlan, parse_rate

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"

DENSE = StepCost(
    seconds=0.25, rows=64, dense_bytes=100_260_040, trained_bytes=100_260_040, slot_bytes=200 << 20
)


def plan_on(rate: str, step: StepCost = DENSE, workers: tuple[int, ...] = (1, 2, 4)) -> WorkersPlan:
    return WorkersPlan(step, Network(bandwidth=parse_rate(rate)), workers)


def test_the_table() -> None:
    text = str(plan_on("1Gbit"))
    assert text.startswith(
        "64 examples in 250 ms on one device, 95.62 MiB of gradients, 1 Gbit/s, latency 100 us\n"
    )
    lines = [" ".join(line.split()) for line in text.splitlines() if line.startswith("  ")]
    assert lines[1] == "1 fit 250 ms 256 100% 250 ms 256 100% 391.23 MiB"
    assert lines[2].startswith("2 fit 1.01 s 126 25% 956 ms")
    assert [line.split()[0] for line in lines[3:6]] == ["bfloat16", "sharded", "both"]
    assert lines[4].endswith("291.23 MiB")  # half of the slots
    assert len(lines) == 1 + 1 + 2 * 4


@pytest.mark.parametrize(
    ("rate", "advice"),
    [
        (
            "1Gbit",
            "On 1 Gbit/s, 2 workers would be slower than one (global batch 64). On 10 Gbit/s, 2"
            " workers would be 1.6 times as fast as one, and 2 workers 2.0 times as fast with"
            ' gradient_dtype="bfloat16".',
        ),
        (
            "5Gbit",
            "On 5 Gbit/s, 2 workers would be no faster than one, but 2 workers 1.5 times as fast"
            ' with gradient_dtype="bfloat16" (global batch 64). With 64 examples for each worker, 4'
            " workers would process 2.5 times as many examples per second as one.",
        ),
        (
            "100Gbit",
            "On 100 Gbit/s, 4 workers would be 3.8 times as fast as one (global batch 64). With 64"
            " examples for each worker, 4 workers would process 3.9 times as many examples per"
            " second as one.",
        ),
    ],
)
def test_the_advice(rate: str, advice: str) -> None:
    assert plan_on(rate).advice == advice


def test_one_worker_needs_no_network() -> None:
    assert plan_on("1Gbit", workers=(1,)).advice.startswith("Plan more than one worker")


def test_the_picture(tmp_path: Path) -> None:
    plan = plan_on("1Gbit")
    plan.save_picture(tmp_path / "plan.svg")
    assert "examples per second" in (tmp_path / "plan.svg").read_text()
    with pytest.raises(PlacementError, match=r"must be a \.svg or a \.png file"):
        plan.save_picture(tmp_path / "plan.gif")


# In Horovod one ring connects all GPUs, and servers send 25 Gbit/s. A P100 computes 219 images of
# ResNet50 per second, and a K80 of TensorFlow's benchmark 51 images. 1 % is the standard deviation
# of the time between workers.
ROCE = Network(bandwidth=parse_rate("25Gbit"), latency=5e-6, bucket_bytes=64 << 20, straggling=0.01)
EC2 = Network(bandwidth=parse_rate("10Gbit"), latency=5e-5, straggling=0.01)
PUBLISHED = {  # a column: (network, images per second of a GPU, values of the model)
    "ResNet50 on P100, 219 images/s, 25 Gbit/s": (ROCE, 219, 25_557_032),
    "ResNet101 on P100, 132 images/s, 25 Gbit/s": (ROCE, 132, 44_549_160),
    "ResNet50 on K80, 51 images/s, 10 Gbit/s": (EC2, 51, 25_557_032),
}


def efficiency(column: str, workers: int) -> float:
    network, images, values = PUBLISHED[column]
    size = 4 * values
    step = StepCost(seconds=64 / images, rows=64, dense_bytes=size, trained_bytes=size)
    return WorkersPlan(step, network, (1, workers)).estimate(workers).efficiency


def test_computed_scaling_is_near_published_scaling() -> None:
    """Horovod: 90 % for ResNet-101 on 512 GPUs. TensorFlow: 82 to 94 % on 64 K80."""
    on_p100, on_k80 = list(PUBLISHED)[1:]
    assert efficiency(on_p100, 512) == pytest.approx(0.90, abs=0.05)
    assert 0.82 <= efficiency(on_k80, 64) <= 0.94
    lines = [f"| workers | {' | '.join(PUBLISHED)} |", "|---" * 4 + "|"]
    for workers in (8, 16, 32, 64, 128, 256, 512):
        cells = " | ".join(f"{efficiency(column, workers):.0%}" for column in PUBLISHED)
        lines.append(f"| {workers} | {cells} |")
    closing = (
        "64 images for each GPU. Workers differ by 1% (standard deviation). Buckets have 64 MiB on"
        " P100."
    )
    table = "\n".join([*lines, "", closing])
    assert f"<!-- scaling begin -->\n\n{table}\n<!-- scaling end -->" in PAGE.read_text(), table
