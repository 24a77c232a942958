"""Trains two embeddings, and prints the peak memory of the chief and of each parameter server.

Arguments: name of the strategy, rows of 32 numbers, name of the optimizer, folder of checkpoints,
epochs, MiB that this process may allocate after the start (0: no limit), and arguments of
`distribute` as JSON. If the folder has a checkpoint, the training resumes.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from own_memory import mebibytes, reset_peak

import tfdist_ext as tfd

WIDTH, BATCH, STEPS, TABLES = 32, 256, 200, 2
STRATEGY, ROWS, OPTIMIZER, FOLDER, EPOCHS, LIMIT, MORE = sys.argv[1:8]


def build():
    import keras

    ids = keras.Input([TABLES], dtype="int64")
    rows = [
        keras.layers.Embedding(int(ROWS), WIDTH, name=f"table_{n}")(ids[:, n])
        for n in range(TABLES)
    ]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile(OPTIMIZER, "mse")
    return model


def servers() -> dict[str, int]:
    """The process of each parameter server of this cluster, which is on this machine."""
    found: dict[str, int] = {}
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster")
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text().partition("TF_CONFIG=")[2].partition("\0")[0]
            config = json.loads(text or "{}")
        except OSError:
            continue
        if cluster and config.get("cluster") == cluster and config["task"]["type"] == "ps":
            found[f"ps {config['task']['index']}"] = int(path.parent.name)
    return dict(sorted(found.items()))


@contextmanager
def phase(name: str, processes: dict[str, int]) -> Iterator[None]:
    processes = {"chief": os.getpid(), **processes}
    for process in processes.values():
        reset_peak(process)
    yield
    peaks = {task: round(mebibytes("VmHWM", process)) for task, process in processes.items()}
    print(f"peak MiB of {name}: {json.dumps(peaks)}", flush=True)


def main() -> None:
    processes = servers()
    with phase("start", processes):
        placement = {"table.*": "device CPU:0"} if STRATEGY == "placed" else None
        cpus = {} if processes else {"logical_cpus": 2}
        strategy = tfd.create_strategy(STRATEGY, placement=placement, **cpus)
        import keras  # noqa: F401
    plan = tfd.plan_placement(build, ps=len(processes) or 1)
    for what, sizes in ("planned", plan.bytes_by_task), ("memory", plan.memory_by_task):
        print(f"{what} MiB: {json.dumps([round(size / 2**20) for size in sizes])}", flush=True)
    if int(LIMIT):
        size = (int(mebibytes("VmData")) + int(LIMIT)) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    with phase("build", processes):
        model = tfd.distribute(build, strategy, **json.loads(MORE))
    generator = np.random.default_rng(0)
    ids = generator.integers(0, int(ROWS), [BATCH * STEPS, TABLES])
    y = generator.normal(size=(len(ids), 1)).astype("float32")
    resume = "resume, " * bool(os.listdir(FOLDER))
    with phase(f"{resume}steps and checkpoint", processes):
        model.fit(ids, y, batch_size=BATCH, epochs=int(EPOCHS), checkpoint_dir=FOLDER, verbose=0)
    print("steps", int(model.optimizer.iterations.numpy()))


if __name__ == "__main__":
    tfd.run(main)
