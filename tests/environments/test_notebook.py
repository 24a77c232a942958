"""`tfd.launch` in real notebooks: cells are executed by a kernel, as Jupyter does it."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pages import blocks_of
from processes import pids_with
from real_jobs import Result, assert_equal, result_in, training

pytestmark = pytest.mark.timeout(200)

jupyter = pytest.importorskip("jupyter_client.manager", reason="pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

MARK = "TFDIST_TEST_NOTEBOOK"


@dataclass
class Ran:
    """The result of a cell, the error that it raised, and its output."""

    shown: list[tuple[float, str]] = field(default_factory=list)  # seconds, text of stdout
    stderr: str = ""
    result: str = ""
    error: tuple[str, str] = ("", "")  # class and message

    @property
    def stdout(self) -> str:
        return "".join(text for _, text in self.shown)


@dataclass
class Kernel:
    manager: Any
    client: Any
    folder: Path

    def __call__(self, code: str, on: str = "", do: Callable[[], None] = lambda: None) -> Ran:
        """Execute a cell; call `do` once its output has the text `on`."""
        request, began, ran = self.client.execute(code), time.monotonic(), Ran()
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=60)
            except queue.Empty:
                pytest.fail(f"the cell has been silent for 60 s: {ran}")
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stderr":
                ran.stderr += content["text"]
            elif kind == "stream":
                ran.shown.append((time.monotonic() - began, content["text"]))
                if on and on in ran.stdout:
                    on = ""
                    do()
            elif kind == "execute_result":
                ran.result = content["data"]["text/plain"]
            elif kind == "error":
                ran.error = content["ename"], content["evalue"]
            elif kind == "status" and content["execution_state"] == "idle":
                return ran

    def left(self) -> list[int]:
        """The processes that the kernel has started, and their children."""
        found = pids_with(MARK, str(self.folder))
        return [pid for pid in found if pid != self.manager.provisioner.pid]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    # A kernel says on its terminal that its messages are not encrypted.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", MARK: str(tmp_path)}
    with open(tmp_path / "kernel.log", "wb") as log:
        manager, client = jupyter.start_new_kernel(cwd=tmp_path, env=env, stdout=log, stderr=log)
        yield Kernel(manager, client, tmp_path)
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_page_is_a_notebook(tmp_path: Path) -> None:
    """docs/notebooks.md, executed cell by cell."""
    cells = [block.text for block in blocks_of("docs/notebooks.md") if block.language == "python"]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises what a cell raises
    output = [
        "".join(each.text for each in cell.outputs if each.output_type == "stream")
        for cell in notebook.cells
    ]
    assert "[worker:0] Epoch 3/3\n" in output[1]
    assert "['worker:0', 'worker:1']\n" in output[1]
    assert "worker:1 failed first" in output[-1]
    assert "killed by SIGKILL" in output[-1]
    assert output[-1].count("[worker:0] Epoch 3/3\n") == 1


def test_output_comes_live_and_a_kernel_may_have_used_tensorflow(kernel: Kernel) -> None:
    """AutoGraph makes a graph of `if` from the text of the function in the cell."""
    ran = kernel("import tensorflow as tf, tfdist_ext as tfd\nfloat(tf.constant(1.0) + 1)")
    assert ran.result == "2.0", ran
    ran = kernel(
        "import time\n"
        "def report(value):\n"
        "    @tf.function\n"
        "    def absolute(x):\n"
        "        if x < 0:\n"
        "            return -x\n"
        "        else:\n"
        "            return x\n"
        "    for number in range(3):\n"
        "        print('at', number)\n"
        "        time.sleep(0.5)\n"
        "    return tfd.ClusterConfig.from_env().task.index, float(absolute(tf.constant(-value)))\n"
        "tfd.launch(report, args=(2.0,))"
    )
    assert ran.result == "{'worker:0': (0, 2.0), 'worker:1': (1, 2.0)}", ran
    assert ran.stderr == ""
    for worker in range(2):
        times = [at for at, text in ran.shown if f"[worker:{worker}] at" in text]
        assert times[-1] - times[0] > 0.4
    assert ran.stdout.count("[worker:1] at 2\n") == 1
    assert not kernel.left()


def test_an_interrupt_saves_and_the_cell_goes_on_when_run_again(
    kernel: Kernel, undisturbed: Result
) -> None:
    _, script, *words = training(kernel.folder, pause=0.05)
    cell = (
        "import runpy, sys, tfdist_ext as tfd\n"
        "def train():\n"
        f"    sys.argv[1:] = {words}\n"
        f"    runpy.run_path({script!r}, run_name='__main__')\n"
        "tfd.launch(train)"
    )
    ran = kernel(cell, "[worker:0] STEP 10\n", kernel.manager.interrupt_kernel)
    assert ran.error == ("KeyboardInterrupt", ""), ran
    assert "tfdist: SIGINT: ending 2 tasks within 5 s" in ran.stderr
    assert "run again: the same call of tfd.launch" in ran.stdout
    assert not kernel.left()
    assert not (kernel.folder / "worker-0.npz").exists()

    ran = kernel(cell.replace("(train)", "(train, workers=1)"))
    assert ran.result == "{'worker:0': None}", ran
    first = int(ran.stdout.partition("STEP ")[2].split()[0])
    assert 10 < first < 20
    assert_equal(result_in(kernel.folder), undisturbed)


@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_with_the_kernel_the_tasks_end(kernel: Kernel, how: str) -> None:
    def end() -> None:
        assert len(kernel.left()) == 3  # two tasks and their watchdog
        if how == "killed":
            os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
        else:
            kernel.manager.restart_kernel(now=True)
        raise StopIteration

    with pytest.raises(StopIteration):
        kernel(
            "import time, tfdist_ext as tfd\n"
            "def sleep():\n"
            "    print('sleeps')\n"
            "    time.sleep(60)\n"
            "tfd.launch(sleep, workers=2)",
            "sleeps\n",
            end,
        )
    deadline = time.monotonic() + 5
    while (left := kernel.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
