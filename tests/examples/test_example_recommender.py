"""The recommender: tables where the plan says, rows that move, and an error that is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import recommender as example

import tfdist_ext as tfd

EPOCHS = 1


@pytest.mark.tfdist_cluster(worker=2, ps=2, timeout=120)
def test_two_workers_learn_from_tables_on_two_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tfd.run(lambda: _trains(tmp_path / "plan.svg", capsys))


def _trains(picture: Path, capsys: Any) -> None:
    moved = _bytes_moved()
    plan, by_hand, model, errors = example.main(EPOCHS, picture)
    moved = _bytes_moved() - moved
    assert "tfdist_ext" in capsys.readouterr().out

    # Where the plan says, and as by hand: half of the films on each server.
    for variable in [*model.weights, *model.optimizer.variables]:
        pieces = _pieces(variable)
        live = [(_server(piece.device), piece.shape.as_list()[:1]) for piece in pieces]
        assert live == [
            (shard.task, [shard.stop - shard.start][: len(variable.shape)])
            for shard in plan.shards_of(variable.path)
        ], variable.path
    for name in ("users", "films"):
        assert plan.tasks_of(f"{name}/embeddings") == (0, 1)
    assert [_server(device) for device in by_hand["films"]] == [0, 1]

    # In each of two trainings each step would move the films' table twice, there and back.
    table = example.FILMS * example.WIDTH * 4
    steps = -(-len(example.load()[0][0]) // example.BATCH) * EPOCHS
    assert int(model.optimizer.iterations.numpy()) == steps
    assert moved < 0.1 * (4 * table * steps)

    # Rows of films that nobody has rated are, in both pieces, as they are made on one device.
    keras.backend.clear_session()
    one_device = example.build(3.5)
    (users, films, stars), test = example.load()
    trained = np.concatenate(
        [piece.numpy() for piece in _pieces(model.get_layer("films").embeddings)]
    )
    rated = np.isin(np.arange(example.FILMS), films)
    same = (trained == one_device.get_layer("films").embeddings.numpy()).all(axis=1)
    np.testing.assert_array_equal(same, ~rated)

    means, hand, ours = errors
    one_device.fit([users, films], stars, batch_size=example.BATCH, epochs=EPOCHS, verbose=0)
    alone = example.rms(one_device.predict(test[:2], verbose=0, batch_size=1024)[:, 0] - test[2])
    assert 0.92 < means < 0.93
    assert max(alone, hand, ours) < means - 0.01
    assert [hand, ours] == pytest.approx([alone] * 2, abs=0.02)


def test_the_kept_picture_is_that_of_the_plan(tmp_path: Path) -> None:
    assert example.main(picture=tmp_path / "plan.svg") is None
    assert (tmp_path / "plan.svg").read_text() == example.PICTURE.read_text()


def _pieces(variable: Any) -> list[Any]:
    return list(getattr(variable.value, "variables", [variable.value]))


def _server(device: str) -> int:
    assert "/job:ps/" in device
    return int(device.split("/task:")[1].split("/")[0])


def _bytes_moved() -> int:
    """Between processes on this machine, all of them, since it was started."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if " lo:" in line)
    return int(line.split(":")[1].split()[0])
