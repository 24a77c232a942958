"""Runs the trainings of `scripts/figures/loss_curves`, and compares them."""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tfdist_ext.launcher.plan import local_plan
from tfdist_ext.launcher.run import Limits, run_plan

TASK = Path(__file__).with_name("loss_curves_task.py")
KILLED_AT = 44  # in the middle of the second epoch, 4 steps after a checkpoint
_LOSS, _WEIGHTS = 1e-5, 1e-6  # the most that runs may differ by


@dataclass
class Run:
    """A training: the loss at each of its steps, and what each worker has at its end."""

    name: str
    losses: dict[int, float]
    weights: list[np.ndarray]
    bytes_of_workers: list[int]
    steps: int
    epochs_bytes: int  # of the files, as often as there are epochs
    off: dict[str, float] = field(default_factory=dict)


def measured() -> list[Run]:
    """The runs, the one with 1 worker first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pattern = _write(folder)
        runs = [_train(f"{n}", n, pattern, folder / f"of_{n}") for n in (1, 2, 4)]
        broken = folder / "broken"
        _train("killed", 4, pattern, broken, kill_at=KILLED_AT)
        after = _train(f"4, killed at step {KILLED_AT}; then 2", 2, pattern, broken)
    for run in [*runs, after]:
        losses = [abs(loss - runs[0].losses[step]) for step, loss in run.losses.items()]
        weights = [
            float(np.abs(mine - its).max())
            for mine, its in zip(run.weights, runs[0].weights, strict=True)
        ]
        run.off = {"loss": max(losses), "weights": max(weights)}
    return [*runs, after]


def over_bounds(runs: list[Run]) -> list[str]:
    """What is not equal, in words."""
    found = [f"loss of {run.name}" for run in runs if run.off["loss"] > _LOSS]
    return found + [f"weights of {run.name}" for run in runs if run.off["weights"] > _WEIGHTS]


def markdown(runs: list[Run]) -> str:
    """The table."""
    first = runs[0]
    shown = [1, 10, first.steps, KILLED_AT, max(first.losses)]
    words = [f"loss at step {step}" for step in shown]
    lines = [
        f"| workers | {' | '.join(words)} | largest difference of a loss |"
        " largest difference of a weight |"
        " bytes read by each worker, over the bytes of the files in all epochs |",
        "|---" * (len(shown) + 4) + "|",
    ]
    for run in runs:
        losses = [f"{run.losses[step]:.6f}" if step in run.losses else "" for step in shown]
        shares = ", ".join(f"{count / run.epochs_bytes:.3f}" for count in run.bytes_of_workers)
        off = f"{run.off['loss']:.0e} | {run.off['weights']:.0e}" if run is not first else " | "
        lines.append(f"| {run.name} | {' | '.join(losses)} | {off} | {shares} |")
    return "\n".join(lines) + "\n"


def draw(runs: list[Run], path: Path) -> None:
    """The curves, one over the other."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tfdist_ext"}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        widths, styles = (7.0, 4.5, 2.5, 1.2), ("-", "-", "-", "--")
        colors = ("#c6dbef", "#6baed6", "#2171b5", "#c00000")
        for run, width, style, color in zip(runs, widths, styles, colors, strict=True):
            steps = list(run.losses)
            axes.plot(steps, run.losses.values(), style, lw=width, color=color, label=run.name)
        axes.axvline(KILLED_AT, color="#888888", lw=0.8, ls=":")
        axes.set(xlabel="step", ylabel="mean loss of the epoch so far", yscale="log")
        axes.legend(title="workers", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def _train(name: str, workers: int, pattern: str, folder: Path, kill_at: int = 0) -> Run | None:
    report = folder / f"report of {workers}"
    command = [sys.executable, str(TASK), pattern, str(folder / "checkpoints"), str(kill_at)]
    env = {**os.environ, "PYTHONPATH": str(TASK.parents[1])}
    folder.mkdir(exist_ok=True)
    print(f"training with {workers} workers ...", file=sys.stderr)
    with (
        open(folder / "output", "a") as output,
        local_plan([*command, str(report)], workers=workers, env=env) as plan,
    ):
        limits = Limits(grace=1, timeout=300)
        ended = run_plan(plan, limits, env=env, stream=output, report=output)
    if kill_at:
        if not ended.exit_status:
            sys.exit(f"{name}: nobody was killed")
        return None
    if ended.exit_status:
        sys.exit((folder / "output").read_text()[-3000:])
    tasks = [json.loads(Path(f"{report}-{i}.json").read_text()) for i in range(workers)]
    chief = tasks[0]
    return Run(
        name,
        {int(step): loss for step, loss in chief["losses"].items()},
        [np.array(weight, "float32") for weight in chief["weights"]],
        [task["bytes"] for task in tasks],
        chief["steps"],
        chief["epochs"]
        * sum(path.stat().st_size for path in Path(pattern).parent.glob("*.tfrecord")),
    )


def _write(folder: Path) -> str:
    """The digits of scikit-learn, in five record files."""
    import tensorflow as tf
    from digits_data import load

    (images, labels), _ = load("digits")
    for number, rows in enumerate(np.array_split(np.arange(len(labels)), 5)):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for row in rows:
                image = tf.train.FloatList(value=images[row].ravel())
                label = tf.train.Int64List(value=[labels[row]])
                features = {
                    "image": tf.train.Feature(float_list=image),
                    "label": tf.train.Feature(int64_list=label),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    return str(folder / "*.tfrecord")
