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

CLUSTER = tfd.ClusterConfig.from_env()


def file_of(server: int) -> Path:
    """The file with the process of a parameter server."""
    return Path(f"{FOLDER}.ps-{server}")


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


@contextmanager
def phase(name: str, processes: dict[str, int]) -> Iterator[None]:
    for process in processes.values():
        reset_peak(process)
    yield
    report(name, processes)


def report(name: str, processes: dict[str, int]) -> None:
    peaks = {task: round(mebibytes("VmHWM", process)) for task, process in processes.items()}
    print(f"peak MiB of {name}: {json.dumps(peaks)}", flush=True)


def main() -> None:
    placement = {"table.*": "device CPU:0"} if STRATEGY == "placed" else None
    cpus = {} if CLUSTER else {"logical_cpus": 2}
    strategy = tfd.create_strategy(STRATEGY, placement=placement, **cpus)
    servers = len(CLUSTER.jobs["ps"]) if CLUSTER else 0
    processes = {"chief": os.getpid()}
    processes |= {f"ps {number}": int(file_of(number).read_text()) for number in range(servers)}
    report("start", processes)
    plan = tfd.plan_placement(build, ps=servers or 1)
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
    if CLUSTER and CLUSTER.task.type == "ps":
        file_of(CLUSTER.task.index).write_text(str(os.getpid()))
    tfd.run(main)
