"""More workers: steps, sums on a network and memory; the plan; rates and times as texts.

The published scaling of ResNets is beside the plan's.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.placement import PlacementError
from tfdist_ext.placement.scaling import (
    Network,
    StepCost,
    WorkersPlan,
    parse_rate,
    parse_seconds,
    rate_text,
    step_seconds,
)
from tfdist_ext.strategies.reductions import SIZES

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)

SLOW = Network(bandwidth=1e6, latency=0.0, usable=1.0, overhead=0.0, bucket_bytes=0, overlap=0.0)
DENSE = StepCost(seconds=1.0, rows=8, dense_bytes=1_000_000, trained_bytes=1_000_000)


@pytest.mark.parametrize(
    ("workers", "settings", "seconds"),
    [
        (1, {}, 0.0),
        (2, {}, 1.0),  # 2 (N-1)/N of 1 MB at 1 MB/s
        (4, {}, 1.5),
        (4, {"narrow": True}, 0.75),
        (4, {"sharded": True}, 1.5),
        (4, {"sharded": True, "narrow": True}, 0.375 + 0.75),  # weights travel as they are
    ],
)
def test_a_ring_sends_its_part_of_the_gradients(
    workers: int, settings: dict[str, bool], seconds: float
) -> None:
    step = step_seconds(DENSE, SLOW, workers, DENSE.rows, **settings)
    assert step == pytest.approx(1.0 + seconds)


def test_each_message_and_each_collective_has_its_time() -> None:
    network = replace(SLOW, bandwidth=math.inf, latency=0.01, overhead=0.1)
    assert step_seconds(DENSE, network, 4, 8) == pytest.approx(1.0 + 6 * 0.01 + 0.1)
    two = replace(network, bucket_bytes=500_000)
    assert step_seconds(DENSE, two, 4, 8) == pytest.approx(1.0 + 2 * (6 * 0.01 + 0.1))
    # An all-to-all is one message, and an all-gather three.
    narrow = step_seconds(DENSE, network, 4, 8, narrow=True)
    assert narrow == pytest.approx(1.0 + 4 * 0.01 + 2 * 0.1)


def test_sums_overlap_with_the_backward_pass() -> None:
    network = replace(SLOW, bandwidth=1e7, bucket_bytes=250_000, overlap=0.5)
    # Four buckets of 25 ms are ready after 0.625, 0.75, 0.875 and 1 s: only the last one shows.
    assert step_seconds(DENSE, network, 2, 8) == pytest.approx(1.025)
    # With 250 ms each, the network works without a pause from 0.625 s on.
    slow = replace(network, bandwidth=1e6)
    assert step_seconds(DENSE, slow, 2, 8) == pytest.approx(1.625)
    assert step_seconds(DENSE, replace(network, bucket_bytes=0), 2, 8) == pytest.approx(1.1)


def test_rows_of_tables_grow_with_the_workers() -> None:
    table = StepCost(
        seconds=1.0, rows=8, dense_bytes=0, trained_bytes=4_000, table_values=1024, table_ids=128
    )
    # Each worker sends the rows and ids of all others.
    size = [table.gathered_bytes(8, workers, narrow=False) for workers in (2, 4, 8)]
    assert size == [n * (4 * 1024 + 8 * 128) for n in (2, 4, 8)]
    assert table.gathered_bytes(8, 2, narrow=True) == 2 * (2 * 1024 + 8 * 128)
    assert table.gathered_bytes(2, 4, narrow=False) == table.gathered_bytes(8, 1, narrow=False)
    assert step_seconds(table, SLOW, 2, 8) == pytest.approx(1.0 + size[0] / 1e6)
    # With shard_optimizer, the whole table travels.
    sharded = step_seconds(table, SLOW, 2, 8, sharded=True)
    assert sharded == pytest.approx(1.0 + size[0] / 1e6 + 2_000 / 1e6)


@QUICK
@given(st.integers(1, 2**28))
def test_rows_are_padded_as_collectives_pad_them(length: int) -> None:
    step = StepCost(seconds=1, rows=1, dense_bytes=0, trained_bytes=0, table_values=length)
    padded = next(size for size in SIZES if size >= length)
    assert step.gathered_bytes(1, 1, narrow=False) == 4 * padded


def test_stragglers_delay_all_workers() -> None:
    network = replace(SLOW, bandwidth=math.inf, straggling=0.05)
    times = [step_seconds(DENSE, network, workers, 8) for workers in (1, 2, 64, 512)]
    assert times[0] == 1.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1 + 0.05 * 3.53, rel=0.001)


def test_memory_of_a_worker() -> None:
    step = replace(DENSE, slot_bytes=2_000_001, other_bytes=10)
    assert step.memory(4, sharded=False) == 1_000_000 + 10 + 2_000_001 + 1_000_000
    assert step.memory(4, sharded=True) == 1_000_000 + 10 + 500_001 + 1_000_000


STEPS = st.builds(
    StepCost,
    seconds=st.floats(1e-4, 10),
    rows=st.integers(1, 512),
    dense_bytes=st.integers(0, 10**9),
    table_values=st.integers(0, 10**7),
    table_ids=st.integers(0, 10**5),
    trained_bytes=st.integers(0, 10**9),
    slot_bytes=st.integers(0, 10**9),
)
NETWORKS = st.builds(
    Network,
    bandwidth=st.floats(1e5, 1e11),
    latency=st.floats(0, 1e-2),
    usable=st.floats(0.1, 1),
    overhead=st.floats(0, 1e-2),
    bucket_bytes=st.none() | st.integers(0, 10**8),
    overlap=st.floats(0, 1),
    straggling=st.floats(0, 0.5),
)


@QUICK
@given(STEPS, NETWORKS, st.integers(2, 1024), st.booleans())
def test_what_must_hold_for_every_step(
    step: StepCost, network: Network, workers: int, sharded: bool
) -> None:
    seconds = step_seconds(step, network, workers, step.rows, sharded=sharded)
    assert seconds >= step.seconds
    faster = replace(network, bandwidth=2 * network.bandwidth)
    assert step_seconds(step, faster, workers, step.rows, sharded=sharded) <= seconds
    nearer = replace(network, latency=network.latency / 2)
    assert step_seconds(step, nearer, workers, step.rows, sharded=sharded) <= seconds
    apart = replace(network, overlap=0.0)
    assert step_seconds(step, apart, workers, step.rows, sharded=sharded) >= seconds * (1 - 1e-9)
    fewer = step_seconds(step, network, workers, -(-step.rows // 2), sharded=sharded)
    assert fewer <= seconds
    plan = WorkersPlan(step, network, (1, workers))
    for same_batch in (False, True):
        estimate = plan.estimate(workers, same_batch=same_batch, sharded=sharded)
        assert 0 < estimate.efficiency <= 1 + 1e-9
    assert step.memory(workers, sharded=True) <= step.memory(workers, sharded=False)
    assert plan.advice.endswith(".")


RESNET50 = StepCost(
    seconds=0.25, rows=64, dense_bytes=100_260_040, trained_bytes=100_260_040, slot_bytes=200 << 20
)


def plan_on(rate: str, workers: tuple[int, ...] = (1, 2, 4)) -> WorkersPlan:
    return WorkersPlan(RESNET50, Network(bandwidth=parse_rate(rate)), workers)


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


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 1.25e8), ("1.25 GB/s", 1.25e9)])
def test_rates(text: str, rate: float) -> None:
    """In lower case, and in bytes; others below."""
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "10", "Gbit", "-1Gbit", "0Gbit", "10G", "10GB", "1e9bit", 10])
def test_what_is_no_rate(text: Any) -> None:
    with pytest.raises(PlacementError, match=r"^network must be a rate with a unit"):
        parse_rate(text)


@QUICK
@given(
    st.integers(1, 999), st.sampled_from("kMGT"), st.sampled_from(["bit", "bit/s", "bps", "b/s"])
)
def test_a_rate_reads_back(number: int, prefix: str, unit: str) -> None:
    rate = parse_rate(f"{number}{prefix}{unit}")
    assert rate == pytest.approx(number * 1000 ** " kMGT".index(prefix) / 8)
    assert rate_text(rate) == f"{number} {prefix}bit/s"
    assert parse_rate(rate_text(rate)) == pytest.approx(rate)


@QUICK
@given(st.text(max_size=12))
def test_any_text_is_a_rate_or_one_error(text: str) -> None:
    for parse in (parse_rate, lambda text: parse_seconds(text, "step")):
        with contextlib.suppress(PlacementError):
            assert 0 <= parse(text) < math.inf


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0.35s", 0.35), ("350ms", 0.35), ("50 us", 5e-5), (0.35, 0.35), (0, 0.0), ("0s", 0.0)],
)
def test_times(value: float | str, seconds: float) -> None:
    assert parse_seconds(value, "step") == seconds


@pytest.mark.parametrize("value", ["0.35", "-1s", "1h", "", -1, math.nan, math.inf, True, None])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(PlacementError, match=r"^step must be a time of at least 0"):
        parse_seconds(value, "step")
