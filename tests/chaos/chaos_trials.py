"""A trial of chaos: tasks of a job get signals, and the job ends as if nothing had happened."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from processes import environment_of, parent_of, pids_with
from task_programs import LEFT_OUT

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "programs" / "interrupted_training.py"
PAUSE = 0.05  # seconds of a step, at least
LIMIT = 400.0  # seconds for a trial
GRACE = 15
STALL = 20  # seconds; the usual 60 would make a trial with STOP last minutes
BOUND = 2e-6  # of the weights; sums of other numbers of workers round differently
RESTARTED = "tfdist: restart"


class Job(NamedTuple):
    """A training on several tasks: options of `tfdist run`, and arguments of the program."""

    options: str
    data: str
    epochs: int
    steps: int  # of an epoch
    gradient_dtype: str = ""


JOBS = {
    "workers, arrays": Job("--workers 3 --min-workers 2", "arrays", 4, 8),
    "workers, tfd.data": Job("--workers 3 --min-workers 2", "tfd.data", 4, 8),
    "workers, bfloat16": Job("--workers 2", "arrays", 4, 8, "bfloat16"),
    "servers": Job("--workers 2 --ps 1 --min-workers 1 --linger 3", "tfd.data", 4, 8),
    # The same as TensorFlow's test of its own PreemptionCheckpointHandler.
    "preemption": Job("--workers 4", "arrays", 8, 15),
}


class Hurt(NamedTuple):
    """A signal to a few tasks: `delay` seconds after a line of a task or of the launcher."""

    signal: str  # KILL, TERM or STOP
    victims: tuple[str, ...]
    line: str = ""  # "": as soon as the victims live
    delay: float = 0.0

    def __str__(self) -> str:
        when = self.line or "the start"
        return f"{self.signal} to {', '.join(self.victims)} {self.delay:.1f} s after {when}"


class Trial(NamedTuple):
    """What is done to a job, one after another."""

    job: str
    hurts: tuple[Hurt, ...]

    def __str__(self) -> str:
        return f"{self.job}: {', then '.join(map(str, self.hurts))}"


def drawn(seed: int, number: int) -> Trial:
    """A random trial, the same for the same numbers."""
    random_ = random.Random(f"{seed} {number}")
    job = random_.choice(["workers, arrays", "workers, tfd.data", "servers"])
    tasks = ["worker:0", "worker:1", *(["chief:0", "ps:0"] if job == "servers" else ["worker:2"])]
    name = random_.choice(["KILL", "KILL", "KILL", "TERM", "STOP"])
    victims = tuple(random_.sample(tasks, random_.choice([1, 1, 1, 2])))
    step, validation = f"STEP {random_.randint(1, 31)}", f"VALIDATION {random_.randint(0, 14)}"
    moments = [("", 12.0), (step, 0.3), (step, 0.3), (validation, 1.0), ("DONE", 0.3)]
    line, longest = random_.choice(moments)
    hurts = [Hurt(name, victims, line, random_.uniform(0.0, longest))]
    if job != "servers" and name == "KILL" and len(victims) == 1 and random_.random() < 0.3:
        hurts.append(Hurt(name, victims, RESTARTED, 1.0))  # as on a broken machine
    return Trial(job, tuple(hurts))


def drawn_preemption(seed: int, number: int) -> Trial:
    """SIGTERM to a random one of four workers after a random step."""
    random_ = random.Random(f"{seed} {number}")
    victims = (f"worker:{random_.randint(0, 3)}",)
    return Trial("preemption", (Hurt("TERM", victims, f"STEP {random_.randint(1, 118)}"),))


# A signal of each kind, at a moment of each kind: import, step, validation, next start.
FIXED = (
    Trial(
        "workers, arrays",
        (
            Hurt("KILL", ("worker:1",)),
            Hurt("KILL", ("worker:0", "worker:2"), "STEP 20"),
            Hurt("KILL", ("worker:1",), RESTARTED),
        ),
    ),
    Trial("workers, bfloat16", (Hurt("KILL", ("worker:1",), "VALIDATION 14"),)),
    Trial(
        "servers",
        (Hurt("KILL", ("ps:0",), "STEP 12"), Hurt("KILL", ("chief:0",), "VALIDATION 5")),
    ),
    Trial(
        "workers, tfd.data",
        (Hurt("TERM", ("worker:2",), "STEP 13"), Hurt("STOP", ("worker:1",), "STEP 20")),
    ),
)


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        fault: what is wrong; "" where all is as undisturbed.
        noticed: seconds from each KILL to the launcher's next line about a task.
        saved: seconds from each TERM until all tasks had saved and ended.
        next_step: seconds from a signal to the first step of the next start.
        difference: of the weights from those of one device.
    """

    fault: str = ""
    noticed: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    next_step: list[float] = field(default_factory=list)
    difference: float = 0.0


class _Run:
    """A job that runs, and its lines with their times."""

    def __init__(self, job: Job, folder: Path):
        words = [*job.options.split(), "--max-restarts", "8", "--log-dir", str(folder / "logs")]
        words += ["--grace", str(GRACE), "--stall-timeout", str(STALL)]
        self.folder = folder
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfdist_ext.cli", "run", *words, "--", *_program(job, folder)],
            env={**_environment(), "TFDIST_CHAOS": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def tasks(self) -> dict[str, int]:
        """Task -> its process, of those that live."""
        found = {}
        for pid in pids_with("TFDIST_CHAOS", str(self.folder)):
            env = environment_of(pid)
            if "TF_CONFIG" in env and parent_of(pid) == self.process.pid:
                task = json.loads(env["TF_CONFIG"])["task"]
                found[f"{task['type']}:{task['index']}"] = pid
        return found

    def first(self, pattern: str, after: float) -> float | None:
        """When a line came first that has this."""
        times = (at for at, line in self.lines if at > after and re.search(pattern, line))
        return next(times, None)

    def hurt(self, hurt: Hurt, after: float) -> float:
        """Send the signal; returns when."""
        pattern = f"^{RESTARTED}" if hurt.line == RESTARTED else rf"\] +{hurt.line}$"
        while hurt.line and self.process.poll() is None and self.first(pattern, after) is None:
            time.sleep(0.005)
        time.sleep(hurt.delay)
        tasks = self.tasks()
        while self.process.poll() is None and not tasks.keys() >= set(hurt.victims):
            time.sleep(0.02)
            tasks = self.tasks()
        at = time.monotonic()
        for victim in tasks.keys() & set(hurt.victims):
            os.kill(tasks[victim], getattr(signal, f"SIG{hurt.signal}"))
        return at

    def wait(self) -> int:
        """Wait for the end; the exit status."""
        status = self.process.wait(LIMIT)
        self._reader.join(5)
        return status

    def kill(self) -> None:
        for pid in pids_with("TFDIST_CHAOS", str(self.folder)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def tail(self) -> str:
        return "\n".join(line for _, line in self.lines[-40:])


def _environment() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{LEFT_OUT}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    env.pop("TF_CONFIG", None)
    return env


def _program(job: Job, folder: Path) -> list[str]:
    numbers = map(str, (job.epochs, job.steps, PAUSE))
    more = filter(None, [job.gradient_dtype])
    return [sys.executable, str(PROGRAM), str(folder), job.data, *numbers, *more]


@functools.cache
def undisturbed(name: str) -> dict[str, np.ndarray]:
    """What a job ends with on one device; on its workers, if rounded gradients depend on them."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory(prefix="undisturbed-") as folder:
        if job.gradient_dtype:
            run = _Run(job, Path(folder))
            assert run.wait() == 0, run.tail()
            return _result(Path(folder), "worker-0")
        program = _program(job, Path(folder))
        subprocess.run(program, env=_environment(), check=True, stdout=subprocess.DEVNULL)
        return _result(Path(folder), "alone")


def tried(trial: Trial) -> Outcome:
    """Hurt a job, and compare its result with that of one device."""
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        run, outcome, at = _Run(JOBS[trial.job], Path(folder)), Outcome(), 0.0
        sent: list[tuple[Hurt, float]] = []
        try:
            for hurt in trial.hurts:
                at = run.hurt(hurt, at)
                sent.append((hurt, at))
                if hurt.signal == "TERM" and hurt.line.startswith("STEP"):
                    outcome.fault = outcome.fault or _fault_of_preemption(run, at, outcome)
            status = run.wait()
            _note_times(run, sent, outcome)
            outcome.fault = outcome.fault or _fault(run, status, trial.job, outcome)
        except subprocess.TimeoutExpired:
            outcome.fault = f"did not end in {LIMIT:.0f} s: {run.tail()}"
        finally:
            run.kill()
    return outcome


def _note_times(run: _Run, sent: Sequence[tuple[Hurt, float]], outcome: Outcome) -> None:
    for hurt, at in sent:
        noticed = run.first(r"^tfdist: \w+:\d+ (failed|was preempted|left)", at)
        if noticed is not None:
            if hurt.signal == "KILL":
                outcome.noticed.append(noticed - at)
            if step := run.first(r"\] +STEP ", noticed + 0.5):
                outcome.next_step.append(step - at)


def _fault_of_preemption(run: _Run, at: float, outcome: Outcome) -> str:
    """What is wrong with how the tasks ended after a SIGTERM; "" for nothing."""
    while (ended := run.first("^tfdist: (preempted;|restart)", at)) is None:
        if run.process.poll() is not None:  # the last step was done, or others do the work
            return ""
        time.sleep(0.02)
    outcome.saved.append(ended - at)
    if ended - at > GRACE + 10:
        return f"it took {ended - at:.0f} s to save and end"
    last: dict[str, str] = {}
    for _, line in run.lines:
        if found := re.match(r"\[(\w+:\d)\] +STEP (\d+)$", line):
            last[found[1]] = found[2]
    if len({*last.values()}) != 1:
        return f"the tasks ended at different steps: {last}"
    files = [path.name for path in (run.folder / "checkpoints").glob("epoch-*-batch-*.safetensors")]
    return f"more than one checkpoint in an epoch: {files}" if len(files) > 1 else ""


def _fault(run: _Run, status: int, name: str, outcome: Outcome) -> str:
    """What is wrong with the end of a job; "" for nothing."""
    if status:
        return f"exit status {status}: {run.tail()}"
    if left := pids_with("TFDIST_CHAOS", str(run.folder)):
        return f"processes are left: {left}"
    if unfinished := list(run.folder.rglob("*.unfinished")):
        return f"files are left: {unfinished}"
    steps = JOBS[name].epochs * JOBS[name].steps
    if name == "servers":  # asynchronous: no two runs have the same weights
        done = _result(run.folder, "chief-0")["iterations"]
        return "" if done == steps else f"{done} steps, not {steps}"
    found, expected = _result(run.folder, "worker-0"), undisturbed(name)
    outcome.difference = max(
        float(np.max(np.abs(found[name] - value))) for name, value in expected.items()
    )
    return "" if outcome.difference <= BOUND else f"weights differ by {outcome.difference:.1e}"


def _result(folder: Path, task: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{task}.npz") as file:
        return dict(file)
