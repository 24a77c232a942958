"""One trial of chaos: a job of several tasks, hurt at a random moment, ends as if it was not."""

from __future__ import annotations

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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from processes import environment_of, parent_of, pids_with

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ROOT / "tests" / "left_out"  # see tests/task_programs.py
PROGRAM = ROOT / "tests" / "programs" / "interrupted_training.py"
PAUSE = 0.05  # seconds of a step, at least
LIMIT = 400.0  # seconds for a trial
GRACE = 15
STALL = 20  # seconds; the usual 60 would make a trial with STOP last minutes
AGAIN = ["--max-restarts", "8"]
PREEMPTED = "four workers, preempted"
# Name -> options, data, epochs, steps of an epoch.
JOBS = {
    "workers, arrays": (["--workers", "3", "--min-workers", "2", *AGAIN], "arrays", 4, 8),
    "workers, tfd.data": (["--workers", "3", "--min-workers", "2", *AGAIN], "tfd.data", 4, 8),
    "servers": (["--workers", "2", "--ps", "1", "--min-workers", "1", *AGAIN], "tfd.data", 4, 8),
    # As TensorFlow's test of its own PreemptionCheckpointHandler.
    PREEMPTED: (["--workers", "4"], "arrays", 8, 15),
}
_NOTICED = re.compile(r"tfdist: \w+:\d+ (failed|was preempted|left)")


@dataclass(frozen=True)
class Trial:
    """What is done to a job.

    Attributes:
        job: a key of JOBS.
        victims: the tasks that get the signal.
        signal: KILL, TERM or STOP.
        moment: when, as a part of the time that the job takes undisturbed; or the line of a task
            after which it is.
        for_good: the victim gets it in the start after that, too, as on a broken machine.
    """

    job: str
    victims: tuple[str, ...]
    signal: str
    moment: float | str
    for_good: bool = False

    @classmethod
    def drawn(cls, seed: int, number: int) -> Trial:
        """The same for the same numbers."""
        random_ = random.Random(f"{seed} {number}")
        job = random_.choice([job for job in JOBS if job != PREEMPTED])
        tasks = ["worker:0", "worker:1", "worker:2"]
        if job == "servers":
            tasks = ["chief:0", "worker:0", "worker:1", "ps:0"]
        how_many = random_.choice([1, 1, 1, 2])
        name = random_.choice(["KILL", "KILL", "KILL", "TERM", "STOP"])
        victims = tuple(random_.sample(tasks, how_many))
        moment = random_.uniform(0.02, 1.0)
        lasting = job != "servers" and name == "KILL" and how_many == 1
        return cls(job, victims, name, moment, lasting and random_.random() < 0.3)

    def __str__(self) -> str:
        lasting = " for good" if self.for_good else ""
        when = f"after {self.moment}" if isinstance(self.moment, str) else f"at {self.moment:.2f}"
        return f"{self.job}: {self.signal} to {', '.join(self.victims)}{lasting} {when}"


_OF_WORKERS, _OF_SERVERS = "workers, arrays", "servers"
# A signal, a task and a moment of each kind: import, step, validation.
FIXED = (
    Trial(_OF_WORKERS, ("worker:0",), "KILL", 0.1),
    Trial(_OF_WORKERS, ("worker:1",), "KILL", "STEP 11", for_good=True),
    Trial(_OF_WORKERS, ("worker:0", "worker:2"), "KILL", "VALIDATION 14"),
    Trial(_OF_WORKERS, ("worker:2",), "TERM", "STEP 13"),
    Trial(_OF_WORKERS, ("worker:1",), "STOP", "STEP 20"),
    Trial(_OF_SERVERS, ("ps:0",), "KILL", "STEP 12"),
    Trial(_OF_SERVERS, ("chief:0",), "KILL", "VALIDATION 5"),
)


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        fault: what is wrong; "" where all is as undisturbed.
        noticed: seconds from the signal to the launcher's first word; None where there was none.
        next_step: seconds from the signal to the first step after another start.
        starts: how many there were.
        difference: of the weights from those of the undisturbed job.
        what: was done, where the trial does not say so.
    """

    fault: str = ""
    noticed: float | None = None
    next_step: float | None = None
    starts: int = 1
    difference: float = 0.0
    what: str = ""


@dataclass
class _Job:
    """A job that runs; its lines with their times."""

    folder: Path
    job: str
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options, data, epochs, steps = JOBS[self.job]
        words = [*options, "--log-dir", str(self.folder / "logs")]
        words += ["--linger", "3", "--grace", str(GRACE), "--stall-timeout", str(STALL)]
        program = [sys.executable, str(PROGRAM), str(self.folder), data]
        program += map(str, (epochs, steps, PAUSE))
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{LEFT_OUT}", "TF_CPP_MIN_LOG_LEVEL": "3"}
        env.pop("TF_CONFIG", None)
        self.mark = f"chaos-{self.folder.name}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfdist_ext.cli", "run", *words, "--", *program],
            env={**env, "TFDIST_CHAOS": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.began = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def tasks(self) -> dict[str, int]:
        """Task -> its process, of those that live."""
        found = {}
        for pid in pids_with("TFDIST_CHAOS", self.mark):
            env = environment_of(pid)
            if "TF_CONFIG" in env and parent_of(pid) == self.process.pid:
                task = json.loads(env["TF_CONFIG"])["task"]
                found[f"{task['type']}:{task['index']}"] = pid
        return found

    def first(self, pattern: re.Pattern[str], after: float) -> float | None:
        """When a line came first."""
        return next((at for at, line in self.lines if at > after and pattern.search(line)), None)


def undisturbed(job: str) -> tuple[float, dict[str, np.ndarray]]:
    """(seconds, what the job ends with)."""
    with tempfile.TemporaryDirectory(prefix="undisturbed-") as folder:
        run = _Job(Path(folder), job)
        status = run.process.wait(LIMIT)
        if status:
            raise SystemExit(f"the undisturbed job failed with {status}: {_tail(run)}")
        return time.monotonic() - run.began, _result(Path(folder))


def tried(trial: Trial, seconds: float, expected: dict[str, np.ndarray]) -> Outcome:
    """Hurt a job, and compare what it ends with."""
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        run = _Job(Path(folder), trial.job)
        outcome = Outcome()
        try:
            hurt = _hurt(run, trial, seconds)
            try:
                status = run.process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                outcome.fault = f"did not end in {LIMIT:.0f} s: {_tail(run)}"
                return outcome
            _note_times(outcome, run, hurt)
            outcome.fault = _fault(run, status, trial.job, expected, outcome)
        finally:
            for pid in pids_with("TFDIST_CHAOS", run.mark):
                os.kill(pid, signal.SIGKILL)
            run.process.wait()
    return outcome


def preempted(seed: int, number: int, expected: dict[str, np.ndarray]) -> Outcome:
    """SIGTERM to a random one of four workers at a random step; then the job once more."""
    random_ = random.Random(f"{seed} {number}")
    _, _, epochs, steps = JOBS[PREEMPTED]
    at, victim = random_.randint(1, epochs * steps - 2), f"worker:{random_.randint(0, 3)}"
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        outcome = Outcome()
        run = _Job(Path(folder), PREEMPTED)
        try:
            while run.process.poll() is None and run.first(_step(at), 0.0) is None:
                time.sleep(0.005)
            hurt = _send(run, (victim,), signal.SIGTERM)
            status = run.process.wait(LIMIT)
            outcome.noticed = time.monotonic() - hurt
            outcome.fault = _fault_of_preemption(run, status, outcome.noticed)
            if not outcome.fault:
                run = _Job(Path(folder), PREEMPTED)
                status = run.process.wait(LIMIT)
                outcome.fault = _fault(run, status, PREEMPTED, expected, outcome)
        except subprocess.TimeoutExpired:
            outcome.fault = f"did not end in {LIMIT:.0f} s: {_tail(run)}"
        finally:
            for pid in pids_with("TFDIST_CHAOS", run.mark):
                os.kill(pid, signal.SIGKILL)
            run.process.wait()
    outcome.what = f"SIGTERM to {victim} after step {at}"
    return outcome


def _fault_of_preemption(run: _Job, status: int, seconds: float) -> str:
    time.sleep(0.3)  # the last lines
    if status != 143:
        return f"exit status {status}: {_tail(run)}"
    if seconds > GRACE + 10:
        return f"it took {seconds:.0f} s"
    last: dict[str, str] = {}
    for _, line in run.lines:
        if found := re.match(r"\[(worker:\d)\] +STEP (\d+)$", line):
            last[found[1]] = found[2]
    if len(last) != 4 or len({*last.values()}) != 1:
        return f"they ended at different steps: {last}"
    files = [path.name for path in (run.folder / "checkpoints").glob("epoch-*-batch-*.safetensors")]
    return f"more than one checkpoint in an epoch: {files}" if len(files) > 1 else ""


def _step(number: int) -> re.Pattern[str]:
    return re.compile(rf"\] +STEP {number}$")


def _hurt(run: _Job, trial: Trial, seconds: float) -> float:
    """Send the signals; returns when."""
    if isinstance(trial.moment, str):
        line = re.compile(rf"\] +{trial.moment}$")
        while run.process.poll() is None and run.first(line, 0.0) is None:
            time.sleep(0.005)
    else:
        time.sleep(trial.moment * seconds)
    number = getattr(signal, f"SIG{trial.signal}")
    at = _send(run, trial.victims, number)
    if trial.for_good:
        (victim,) = trial.victims
        restarted = re.compile("tfdist: restart 1 of")
        while run.process.poll() is None and run.first(restarted, at) is None:
            time.sleep(0.1)
        while run.process.poll() is None and victim not in run.tasks():
            time.sleep(0.1)
        time.sleep(1.0)
        _send(run, trial.victims, number)
    return at


def _send(run: _Job, victims: tuple[str, ...], number: int) -> float:
    tasks = run.tasks()
    at = time.monotonic()
    for victim in victims:
        if victim in tasks:
            os.kill(tasks[victim], number)
    return at


def _note_times(outcome: Outcome, run: _Job, hurt: float) -> None:
    outcome.starts = 1 + sum("tfdist: restart " in line for _, line in run.lines)
    outcome.starts += sum("tfdist: preempted;" in line for _, line in run.lines)
    noticed = run.first(_NOTICED, hurt)
    outcome.noticed = None if noticed is None else noticed - hurt
    if noticed is not None:
        step = run.first(re.compile(r"\] +STEP "), noticed + 0.5)
        outcome.next_step = None if step is None else step - hurt


def _fault(
    run: _Job, status: int, job: str, expected: dict[str, np.ndarray], outcome: Outcome
) -> str:
    if status:
        return f"exit status {status}: {_tail(run)}"
    if left := pids_with("TFDIST_CHAOS", run.mark):
        return f"processes are left: {left}"
    if unfinished := list(run.folder.rglob("*.unfinished")):
        return f"files are left: {unfinished}"
    found = _result(run.folder)
    if found["iterations"] != expected["iterations"]:
        return f"{found['iterations']} steps, not {expected['iterations']}"
    if job == "servers":  # asynchronous: no two runs have the same weights
        return ""
    outcome.difference = max(
        float(np.max(np.abs(found[name] - value))) for name, value in expected.items()
    )
    return "" if outcome.difference <= 1e-6 else f"weights differ by {outcome.difference:.1e}"


def _result(folder: Path) -> dict[str, np.ndarray]:
    for name in ("chief-0", "worker-0"):
        if (folder / f"{name}.npz").exists():
            with np.load(folder / f"{name}.npz") as file:
                return dict(file)
    raise SystemExit(f"no result in {folder}: {os.listdir(folder)}")


def _tail(run: _Job) -> str:
    return "\n".join(line for _, line in run.lines[-40:])
