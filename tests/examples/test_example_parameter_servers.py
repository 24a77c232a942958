"""docs/examples/parameter_servers.py on two real workers and two real servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ON_SERVER_0 = "/job:ps/replica:0/task:0/device:CPU:0"


def check(found: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import parameter_servers as example

    assert set(found["devices"]) == {ON_SERVER_0}
    assert found["steps"] == example.STEPS
    np.testing.assert_allclose(found["weights"], example.WEIGHTS, atol=0.02)
    example.report(found)
    assert capsys.readouterr().out.startswith(f"150 steps; variables on {ON_SERVER_0}")


@pytest.mark.long
@pytest.mark.tfdist_cluster(worker=2, ps=2)
def test_plain(tfdist_cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import parameter_servers as example

    found = example.plain()  # workers and servers stay in here
    check(found, capsys)
    # Were these equal, the example could say so, and leave the creator out.
    servers = [device.split("/task:")[1][0] for device in found["ignored"]]
    assert servers == ["0", "1"]
    for job in ("worker", "ps"):
        for index in range(2):
            tfdist_cluster.kill(job, index)


@pytest.mark.tfdist_cluster(worker=2, ps=2)
def test_with_tfdist_ext(tfdist_cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import parameter_servers as example

    import tfdist_ext as tfd

    tfd.run(lambda: check(example.with_tfdist_ext(), capsys))
