"""The arithmetic of more workers: steps, sums on a network, memory; rates and times as texts."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
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
