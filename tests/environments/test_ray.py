"""Trainings in the workers of a real Ray Train run on this machine."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import blocks_of
from processes import command_of, is_alive, pids
from real_jobs import ROOT, Process, Result, Starter, assert_equal, result_in, training
from task_programs import LEFT_OUT

WHY_NOT = (
    ""
    if importlib.util.find_spec("ray")
    else "Ray is not installed (pip install -e '.[environments]')"
)
pytestmark = pytest.mark.timeout(240)
on_ray = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
EPOCHS, STEPS = 3, 30
ENV = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
EXAMPLES = f"{ROOT / 'docs' / 'examples'}:{LEFT_OUT}"


def wait_for_end(driver: Process) -> str:
    assert driver.ended(200) == 0, driver.output[-6000:]
    return driver.output


@on_ray
def test_a_node_that_is_lost(
    start: Starter, tmp_path: Path, undisturbed: Callable[[int, int], Result]
) -> None:
    """One of two nodes is killed, and a third one is free.

    Ray starts the workers again, and they continue to the weights of a training on one device.
    """
    expected = undisturbed(EPOCHS, STEPS)
    command = [*training(tmp_path, EPOCHS, STEPS)[1:], "ray"]
    program = str(ROOT / "tests" / "programs" / "ray_training.py")
    driver = start(sys.executable, program, str(tmp_path), *command, **ENV)
    driver.wait_for("STEP 40", 120)
    before = {(tmp_path / f"worker-{rank}").read_text() for rank in (0, 1)}
    (tmp_path / "lose").touch()
    log = wait_for_end(driver)

    after = {(tmp_path / f"worker-{rank}").read_text() for rank in (0, 1)}
    nodes = [{worker.split()[1] for worker in workers} for workers in (before, after)]
    assert [len(each) for each in nodes] == [2, 2]
    assert len(nodes[0] & nodes[1]) == 1  # one of them was lost
    assert_equal(result_in(tmp_path), expected)
    assert "resuming after epoch 1 (step 30)" in log
    known = json.loads((tmp_path / "result.json").read_text())
    for name in ("loss", "val_loss"):
        reported = [metrics[name] for metrics in known["reported"]]
        assert reported == pytest.approx(expected[name], abs=1e-6)
    assert [metrics["epoch"] for metrics in known["reported"]] == list(range(EPOCHS))
    latest = Path(known["checkpoint"]) / "checkpoint.safetensors"
    newest = tmp_path / "checkpoints" / f"epoch-{EPOCHS:05d}.safetensors"
    assert filecmp.cmp(latest, newest, shallow=False)

    session = (tmp_path / "session").read_text()
    assert not [pid for pid in pids() if session in " ".join(command_of(pid))]
    assert not any(is_alive(int(worker.split()[0])) for worker in before | after)


@on_ray
@pytest.mark.long
def test_ray_reports_the_worker_that_is_the_cause(start: Starter, tmp_path: Path) -> None:
    """One that raises, one that gets SIGTERM, and one that returns while another needs it."""
    programs = ROOT / "tests" / "programs"
    words = (str(programs / "ray_failures.py"), str(tmp_path), "raises", "terminated", "leaves")
    wait_for_end(start(sys.executable, *words, **ENV, PYTHONPATH=f"{programs}:{LEFT_OUT}"))
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert errors["raises"] == {"1": "ValueError('no such file: data.tfrecord')"}
    # Ray lists those that fail before it asks: the other one may have noticed, too, and says who.
    assert "WorkerHealthCheckFailedError" in errors["terminated"].pop("1")
    assert all("PeerError('worker:1 left" in text for text in errors["terminated"].values())
    assert list(errors["leaves"]) == ["0"]
    assert "PeerError('worker:1 left at" in errors["leaves"]["0"]


ON_ONE_DEVICE = """
import sys
from pathlib import Path
import ray_train as example
import tfdist_ext as tfd

def new_model():
    return tfd.distribute(example.build, tfd.create_strategy("default"))

def loss(model, data, first, epochs):
    return model.fit(data, initial_epoch=first, epochs=epochs, verbose=0).history["loss"][-1]

def arrays(seed, batch=example.BATCH):
    return tfd.data.from_arrays(example.examples(), global_batch_size=batch, seed=seed)

model, further = new_model(), new_model()
print(loss(model, arrays(7), 0, 3))
model.save_checkpoint("checkpoint.safetensors")
further.restore_checkpoint("checkpoint.safetensors")
print(loss(further, arrays(8), 3, 5))
print(loss(new_model(), arrays(0, batch=example.ROWS), 0, 3))
"""


def on_one_device(start: Starter) -> list[float]:
    """The losses at the end of the example's trainings; the last one has batches of all rows."""
    process = start(sys.executable, "-c", ON_ONE_DEVICE, PYTHONPATH=EXAMPLES)
    return [float(line) for line in wait_for_end(process).splitlines()[-3:]]


def last_report(run: Path) -> dict[str, float]:
    found = sorted(run.glob("checkpoint_*/.metadata.json"))
    assert found, sorted(run.iterdir())
    return json.loads(found[-1].read_text())


@on_ray
def test_the_example(start: Starter, tmp_path: Path) -> None:
    """On two workers, and further on one, from the checkpoint that Ray has kept."""
    example = str(ROOT / "docs" / "examples" / "ray_train.py")
    log = wait_for_end(start(sys.executable, example, str(tmp_path / "storage"), **ENV))
    trained, further, _ = on_one_device(start)
    for run, epochs, loss in (("arrays", 3, trained), ("further", 5, further)):
        report = last_report(tmp_path / "storage" / run)
        assert report["epoch"] == epochs - 1
        assert report["loss"] == pytest.approx(loss, rel=1e-5)
        assert f"epoch {epochs} " in log
        assert f"loss {loss:.4f}" in log
    assert (tmp_path / "storage" / "arrays" / "model.keras").exists()


@on_ray
@pytest.mark.long
def test_the_example_on_shards_of_ray(start: Starter, tmp_path: Path) -> None:
    """Which rows share a batch is Ray's choice: here all rows are one batch."""
    code = (
        "import pathlib, ray, ray_train as example; ray.init(num_cpus=4);"
        f" example.on_shards(pathlib.Path({str(tmp_path)!r}), batch=example.ROWS); ray.shutdown()"
    )
    wait_for_end(start(sys.executable, "-c", code, **ENV, PYTHONPATH=EXAMPLES))
    report = last_report(tmp_path / "shards")
    assert report["epoch"] == 2
    assert report["loss"] == pytest.approx(on_one_device(start)[2], rel=1e-5)


def test_the_page_shows_the_example() -> None:
    """The Python of docs/ray.md is that of the example, which is run above."""
    example = (ROOT / "docs" / "examples" / "ray_train.py").read_text()
    shown = [block.text for block in blocks_of("docs/ray.md") if block.language == "python"]
    assert len(shown) == 4
    for text in shown:
        imports, _, function = text.rpartition("\n\n\ndef ")
        assert all(line in example for line in imports.splitlines())
        assert f"def {function.removeprefix('def ')}" in example
