"""Runs the trainings of `scripts/figures/restarts`, and compares them."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TASK = Path(__file__).with_name("restarts_task.py")
OPTIONS = ["--max-restarts", "3", "--min-workers", "2"]
WITHIN = 1e-6  # losses and weights may differ by that much
_BIN = 1.0  # seconds


@dataclass
class Run:
    """A job, over all of its starts.

    Attributes:
        steps: what the chief has noted of each: start, workers, time, step, loss.
        weights: that it ends with.
    """

    steps: list[dict[str, float]]
    weights: dict[str, np.ndarray]

    def starts(self) -> list[list[dict[str, float]]]:
        """The steps of each start."""
        return [list(of) for _, of in itertools.groupby(self.steps, lambda step: step["start"])]


def measured() -> tuple[Run, Run]:
    """(the job with two restarts, the uninterrupted job)."""
    return _run("yes"), _run("no")


def _run(dies: str) -> Run:
    path = os.pathsep.join([str(ROOT), str(ROOT / "docs" / "examples")])
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tfdist_ext.cli", "run", "--workers", "3", *OPTIONS]
        command += ["--log-dir", f"{name}/logs", "--", sys.executable, str(TASK), name, dies]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, timeout=300, capture_output=True
        )
        if done.returncode:
            sys.exit(done.stderr.decode()[-3000:] + done.stdout.decode()[-3000:])
        lines = (Path(name) / "steps.jsonl").read_text().splitlines()
        with np.load(Path(name) / "weights.npz") as file:
            return Run([json.loads(line) for line in lines], dict(file))


def differences(hurt: Run, whole: Run) -> tuple[float, float]:
    """(the most that a loss differs, the most that a weight does)."""
    expected = {step["step"]: step["loss"] for step in whole.steps}
    losses = [abs(step["loss"] - expected[step["step"]]) for step in hurt.steps]
    weights = [
        float(np.abs(hurt.weights[name] - whole.weights[name]).max()) for name in whole.weights
    ]
    return max(losses), max(weights)


def faults(hurt: Run, whole: Run) -> list[str]:
    """What is not as it should be, in words."""
    loss, weight = differences(hurt, whole)
    workers = [int(of[0]["workers"]) for of in hurt.starts()]
    found = [] if workers == [3, 3, 2] else [f"the starts had {workers} workers"]
    if {step["step"] for step in hurt.steps} != {step["step"] for step in whole.steps}:
        found.append("a step is missing")
    return found + (
        [f"differences of {loss:.0e}, {weight:.0e}"] if max(loss, weight) > WITHIN else []
    )


def markdown(hurt: Run, whole: Run) -> str:
    """What each start did, and the differences."""
    began = hurt.steps[0]["time"]
    lines = ["| run | workers | steps | seconds of the job |", "|---|---|---|---|"]
    for number, steps in enumerate(hurt.starts(), start=1):
        first, last = steps[0], steps[-1]
        when = f"{first['time'] - began:.0f} to {last['time'] - began:.0f}"
        workers = int(first["workers"])
        lines.append(f"| {number} | {workers} | {first['step']} to {last['step']} | {when} |")
    loss, weight = differences(hurt, whole)
    lines += [
        "",
        f"The losses of all {len(whole.steps)} steps differ from those of an uninterrupted job"
        f" by at most {loss:.0e}, and the final weights by at most {weight:.0e}.",
    ]
    return "\n".join(lines) + "\n"


def draw(hurt: Run, whole: Run, path: Path) -> None:
    """Steps a second over time, and below it the losses, one over the other."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tfdist_ext"}):
        figure = Figure(figsize=(7, 5), layout="constrained")
        FigureCanvasSVG(figure)
        speed, losses = figure.subplots(2, 1)
        began = hurt.steps[0]["time"]
        times = np.array([step["time"] - began for step in hurt.steps])
        edges = np.arange(0, times[-1] + _BIN, _BIN)
        speed.stairs(np.histogram(times, edges)[0] / _BIN, edges, fill=True, color="#6baed6")
        for steps in hurt.starts():
            place = (steps[0]["time"] + steps[-1]["time"]) / 2 - began
            speed.text(place, 1, f"{int(steps[0]['workers'])} workers", rotation=90, ha="center")
        speed.set(xlabel="seconds since the first step", ylabel="steps/s")
        for run, width, style, color, label in (
            (whole, 4.5, "-", "#c6dbef", "uninterrupted"),
            (hurt, 1.2, "--", "#c00000", "with two restarts"),
        ):
            steps = sorted(run.steps, key=lambda step: step["step"])
            where, what = [each["step"] for each in steps], [each["loss"] for each in steps]
            losses.plot(where, what, style, lw=width, color=color, label=label)
        for steps in hurt.starts()[1:]:
            losses.axvline(steps[0]["step"], color="#888888", lw=0.8, ls=":")
        losses.set(xlabel="step", ylabel="mean loss of the epoch so far", yscale="log")
        losses.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
