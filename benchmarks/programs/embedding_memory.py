"""Trains an embedding on parameter servers, and prints the peak memory of each task by phase.

Arguments: rows of 32 numbers, name of the optimizer, folder of checkpoints, epochs, MiB that the
chief may allocate (0: no limit), and arguments of `distribute` as JSON. If the folder has a
checkpoint, the training resumes.
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
ROWS, OPTIMIZER, FOLDER, EPOCHS, LIMIT, MORE = int(sys.argv[1]), *sys.argv[2:4], *sys.argv[4:7]


def build():
    import keras

    ids = keras.Input([TABLES], dtype="int64")
    rows = [
        keras.layers.Embedding(ROWS, WIDTH, name=f"table_{n}")(ids[:, n]) for n in range(TABLES)
    ]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile(OPTIMIZER, "mse")
    return model


def servers() -> dict[str, int]:
    """The process of each parameter server of this cluster, which is on this machine."""
    found = {}
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_text().partition("TF_CONFIG=")[2].partition("\0")[0]
            config = json.loads(text or "{}")
        except OSError:
            continue
        if config.get("cluster") == cluster and config["task"]["type"] == "ps":
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
        strategy = tfd.create_strategy("parameter_server")
        import keras  # noqa: F401
    planned = tfd.plan_placement(build, ps=len(processes)).bytes_by_task
    print(f"planned MiB {json.dumps([round(each / 2**20) for each in planned])}", flush=True)
    if int(LIMIT):
        used = int(mebibytes("VmData"))
        print(f"limit: {LIMIT} MiB beside {used} MiB at start")
        size = (used + int(LIMIT)) * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    with phase("build", processes):
        model = tfd.distribute(build, strategy, **json.loads(MORE))
    generator = np.random.default_rng(0)
    ids = generator.integers(0, ROWS, [BATCH * STEPS, TABLES])
    y = generator.normal(size=(len(ids), 1)).astype("float32")
    resumed = bool(os.listdir(FOLDER))
    with phase("resume, steps and checkpoint" if resumed else "steps and checkpoint", processes):
        model.fit(ids, y, batch_size=BATCH, epochs=int(EPOCHS), checkpoint_dir=FOLDER, verbose=0)
    print("steps", int(model.optimizer.iterations.numpy()))


if __name__ == "__main__":
    tfd.run(main)
