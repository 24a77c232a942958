"""Trainings in the workers of a real Ray Train on this machine."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pages import blocks_of
from processes import command_of, is_alive, pids
from real_jobs import (
    EPOCHS,
    ROOT,
    STEPS,
    Process,
    Result,
    Starter,
    assert_equal,
    result_in,
    training,
)
from task_programs import LEFT_OUT_OF_RAY

WHY_NOT = (
    ""
    if importlib.util.find_spec("ray")
    else "Ray is not installed (pip install -e '.[environments]')"
)
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]
on_ray = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
ENV = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
EXAMPLES = f"{ROOT / 'docs' / 'examples'}:{LEFT_OUT_OF_RAY}"


def wait_for_end(driver: Process) -> str:
    assert driver.ended(400) == 0, driver.output[-6000:]
    return driver.output


class Ran(NamedTuple):
    """The trainings on a Ray of two nodes."""

    folder: Path
    log: str
    known: dict[str, Any]
    workers: list[set[str]]  # pid and node of both, before and after a node was lost


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ray")

    def workers() -> set[str]:
        return {(folder / f"worker-{rank}").read_text() for rank in (0, 1)}

    command = [*training(folder, pause=0.3)[1:], "ray"]
    program = str(ROOT / "tests" / "programs" / "ray_training.py")
    start = Starter(folder)
    try:
        driver = start(sys.executable, program, str(folder), *command, **ENV, PYTHONPATH=EXAMPLES)
        driver.wait_for(f"STEP {STEPS + 3}", 400)
        before = workers()
        (folder / "lose").touch()
        log = wait_for_end(driver)
    finally:
        start.end()
    known = json.loads((folder / "result.json").read_text())
    return Ran(folder, log, known, [before, workers()])


@on_ray
def test_a_node_that_is_lost(ran: Ran, undisturbed: Result) -> None:
    """Ray starts both workers on the other node. They end with the weights of one device."""
    before, after = ({worker.split()[1] for worker in workers} for workers in ran.workers)
    assert len(before) == 2
    assert len(after) == 1
    assert after < before
    assert_equal(result_in(ran.folder), undisturbed)
    assert re.search(rf"resuming .*step {STEPS}\b", ran.log)
    for name in ("loss", "val_loss"):
        reported = [metrics[name] for metrics in ran.known["reported"]]
        assert reported == pytest.approx(undisturbed[name], abs=1e-6)
    assert [metrics["epoch"] for metrics in ran.known["reported"]] == list(range(EPOCHS))
    latest = Path(ran.known["checkpoint"]) / "checkpoint.safetensors"
    newest = ran.folder / "checkpoints" / f"epoch-{EPOCHS:05d}.safetensors"
    assert filecmp.cmp(latest, newest, shallow=False)

    session = (ran.folder / "session").read_text()
    assert not [pid for pid in pids() if session in " ".join(command_of(pid))]
    assert not any(is_alive(int(worker.split()[0])) for worker in set.union(*ran.workers))


@on_ray
def test_the_example(ran: Ran) -> None:
    """On two workers, and further on one, from the checkpoint that Ray has kept."""
    for run, epochs, loss in zip(
        ("arrays", "further"), (3, 5), ran.known["one device"], strict=True
    ):
        report = last_report(ran.folder / "storage" / run)
        assert report["epoch"] == epochs - 1
        assert report["loss"] == pytest.approx(loss, rel=1e-5)
        assert re.search(rf"epoch {epochs} .*loss {loss:.4f}", ran.log)
    assert (ran.folder / "storage" / "arrays" / "model.keras").exists()


@on_ray
def test_ray_tune_tries_distributed_models(start: Starter, tmp_path: Path) -> None:
    """Ray's own Keras callback reports the numbers of plain Keras, and saves a plain model."""
    program = str(ROOT / "tests" / "programs" / "ray_tune.py")
    wait_for_end(start(sys.executable, program, str(tmp_path), **ENV, PYTHONPATH=LEFT_OUT_OF_RAY))
    plain, ours = json.loads((tmp_path / "result.json").read_text())
    assert (plain["is_distributed"], ours["is_distributed"]) == (False, True)
    for name in ("loss", "mae", "val_loss", "val_mae"):
        assert len(ours[name]) == 3
        assert ours[name] == pytest.approx(plain[name], rel=1e-5)
    assert ours["loaded"] == pytest.approx(plain["val_loss"][-1], rel=1e-5)


def last_report(run: Path) -> dict[str, float]:
    found = sorted(run.glob("checkpoint_*/.metadata.json"))
    assert found, sorted(run.iterdir())
    return json.loads(found[-1].read_text())


@on_ray
@pytest.mark.long
def test_ray_reports_the_worker_that_is_the_cause(start: Starter, tmp_path: Path) -> None:
    """One that raises, one that gets SIGTERM, and one that returns while another needs it."""
    programs = ROOT / "tests" / "programs"
    words = (str(programs / "ray_failures.py"), str(tmp_path), "raises", "terminated", "leaves")
    wait_for_end(start(sys.executable, *words, **ENV, PYTHONPATH=f"{programs}:{LEFT_OUT_OF_RAY}"))
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert errors["raises"] == {"1": "ValueError('no such file: data.tfrecord')"}
    # Ray lists those that fail before it asks: the other one may have noticed, too, and says who.
    assert "WorkerHealthCheckFailedError" in errors["terminated"].pop("1")
    assert all("PeerError('worker:1 left" in text for text in errors["terminated"].values())
    assert list(errors["leaves"]) == ["0"]
    assert "PeerError('worker:1 left at" in errors["leaves"]["0"]


@on_ray
@pytest.mark.long
def test_the_example_on_shards_of_ray(start: Starter, tmp_path: Path) -> None:
    """Which rows share a batch is Ray's choice: here all rows are one batch."""
    code = (
        "import pathlib, ray, ray_train as example, tfdist_ext as tfd; ray.init(num_cpus=4)\n"
        f"example.on_shards(pathlib.Path({str(tmp_path)!r}), batch=example.ROWS); ray.shutdown()\n"
        "model = tfd.distribute(example.build, tfd.create_strategy('default'))\n"
        "data = tfd.data.from_arrays(example.examples(), global_batch_size=example.ROWS)\n"
        "print(model.fit(data, epochs=3, verbose=0).history['loss'][-1])"
    )
    log = wait_for_end(start(sys.executable, "-c", code, **ENV, PYTHONPATH=EXAMPLES))
    report = last_report(tmp_path / "shards")
    assert report["epoch"] == 2
    assert report["loss"] == pytest.approx(float(log.splitlines()[-1]), rel=1e-5)


def test_the_page_shows_the_example() -> None:
    """The Python of docs/ray.md is that of the example, which is run above."""
    example = (ROOT / "docs" / "examples" / "ray_train.py").read_text()
    shown = [block.text for block in blocks_of("docs/ray.md") if block.language == "python"]
    assert len(shown) == 2
    for text in shown:
        imports, _, function = text.rpartition("\n\n\ndef ")
        assert all(line in example for line in imports.splitlines())
        assert f"def {function.removeprefix('def ')}" in example
