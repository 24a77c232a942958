"""What `auto` means, as a table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tfdist_ext.strategies.choice import choose

CPU, TWO_CPUS = ["CPU:0"], ["CPU:0", "CPU:1"]


@pytest.mark.parametrize(
    ("jobs", "tpu", "devices", "asked_for", "name", "because"),
    [
        (["worker"], None, CPU, None, "multi_worker_mirrored", "TF_CONFIG describes a cluster"),
        (["chief", "worker"], "t", TWO_CPUS, None, "multi_worker_mirrored", "(chief, worker)"),
        (["chief", "worker", "ps"], None, CPU, None, "parameter_server", "TF_CONFIG has ps tasks"),
        (["worker"], None, CPU, 2, "multi_worker_mirrored", "TF_CONFIG"),
        (None, "t", TWO_CPUS, None, "tpu", "names the TPU 't'"),
        (None, "t", TWO_CPUS, 2, "mirrored", "devices= asks for 2"),
        (None, None, CPU, 3, "mirrored", "devices= asks for 3"),  # which then says why it cannot
        (None, None, TWO_CPUS, 1, "one_device", "devices= asks for 1"),
        (None, None, [*CPU, "GPU:0", "GPU:1"], None, "mirrored", "2 GPUs on this machine"),
        (None, None, [*TWO_CPUS, "GPU:0"], None, "one_device", "one GPU on this machine"),
        (None, None, TWO_CPUS, None, "mirrored", "2 logical CPUs on this machine"),
        (None, None, CPU, None, "default", "one CPU on this machine"),
        (None, None, [*CPU, "XLA_GPU:0", "XLA_GPU:1"], None, "default", "one CPU"),
    ],
)
def test_the_most_specific_signal_wins(
    jobs: list[str] | None,
    tpu: str | None,
    devices: list[str],
    asked_for: int | None,
    name: str,
    because: str,
) -> None:
    choice = choose(
        cluster_jobs=jobs,
        cluster_source="TF_CONFIG",
        tpu=tpu,
        devices=lambda: devices,
        asked_for=asked_for,
    )
    assert choice.name == name
    assert because in choice.because
    assert not any(line.startswith(f"{name}:") for line in choice.passed_over)


@pytest.mark.parametrize(("jobs", "tpu"), [(["worker"], None), (None, "local")])
def test_devices_are_not_listed_where_that_would_start_tensorflow_too_early(
    jobs: list[str] | None, tpu: str | None
) -> None:
    def devices() -> Sequence[str]:
        raise AssertionError("devices were listed")

    choose(cluster_jobs=jobs, cluster_source="x", tpu=tpu, devices=devices)
    choose(cluster_jobs=None, cluster_source="x", tpu=None, devices=devices, asked_for=2)
