"""What the tests of environments share: a training as a job, its processes and its result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "tests" / "programs" / "interrupted_training.py"
BIN = Path(sys.executable).parent  # of the Python that pages call python
PATH = f"{BIN}:{os.environ['PATH']}"
EPOCHS, STEPS = 3, 8  # of the training, and of an epoch
Result = dict[str, np.ndarray]


@dataclass
class Process:
    """A process that a test has started; its output goes to a file."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until it has written this."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.popen.poll() is None, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {seconds} s:\n{self.output}"
            time.sleep(0.05)

    def ended(self, seconds: float = 120) -> int:
        """Its exit status."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end in {seconds} s:\n{self.output}")


@dataclass
class Starter:
    """Starts processes with their output in files of a folder."""

    folder: Path
    processes: list[Process] = field(default_factory=list)

    def __call__(self, *words: str, cwd: Path | None = None, **env: str) -> Process:
        log = self.folder / f"process-{len(self.processes)}.log"
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        with open(log, "wb") as output:
            popen = subprocess.Popen(
                words,
                env={**inherited, "PATH": PATH, "TF_CPP_MIN_LOG_LEVEL": "3", **env},
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(Process(popen, log))
        return self.processes[-1]

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.popen.poll() is None:
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()


def training(folder: Path, pause: float = 0.1) -> list[str]:
    """The command of a training that can be hurt; it writes its weights into the folder.

    Args:
        pause: seconds of a step, at least.
    """
    numbers = map(str, (EPOCHS, STEPS, pause))
    return [sys.executable, str(TRAINING), str(folder), "arrays", *numbers]


def result_in(folder: Path) -> Result:
    """What the first task of a training has ended with."""
    names = ("alone", "chief-0", "worker-0")
    path = next(folder / f"{name}.npz" for name in names if (folder / f"{name}.npz").exists())
    with np.load(path) as file:
        return dict(file)


def assert_equal(found: Result, expected: Result) -> None:
    """The same weights, as far as a sum in another order gives them, after as many steps."""
    assert found.keys() == expected.keys()
    assert found["iterations"] == expected["iterations"]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6, err_msg=name)
