"""One worker of a cluster that trains while another one leaves, dies or does something else.

Arguments: what happens, to which worker, and a folder for checkpoints.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tfdist_ext as tfd

own_handler = []
if sys.argv[1] == "slow":
    signal.signal(signal.SIGTERM, lambda *_: own_handler.append(True))
with ThreadPoolExecutor(1) as thread:  # as in a worker of Ray, whose process lives on
    in_thread = sys.argv[1] == "leaves its thread"
    make = tfd.create_strategy
    strategy = thread.submit(make).result() if in_thread else make()
if in_thread:
    print(Path("/proc/self/status").read_text(), flush=True)  # which signals are caught

import keras  # noqa: E402
import mlp  # noqa: E402

event, victim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x, y = mlp.data()
model = tfd.distribute(mlp.build, strategy)


class InThirdEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch != 2:
            return
        if rank != victim:
            return
        print("NOW", flush=True)
        if event == "leaves":
            sys.exit(0)
        if event == "fails":
            raise RuntimeError("no such file: data.tfrecord")
        if event.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, event))
        if event == "evaluates":
            self.model.evaluate(x, y, verbose=0)
        if event == "slow":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(13)


def different_calls():
    try:
        if rank == victim:
            model.save(os.path.join(folder, "model.keras"))
        else:
            model.evaluate(x, y, verbose=0)
    except tfd.TrainingError as error:
        return str(error)
    return "it passed"


if event == "leaves its thread":
    from tfdist_ext.training.agreement import barriers

    barriers.LEAVE_LIMIT = 3.0

    def train():
        for _ in range(1 if rank == victim else 2):
            model.fit(x, y, batch_size=mlp.BATCH, epochs=1, verbose=0)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(train).result()
    time.sleep(60)

history = model.fit(
    x,
    y,
    batch_size=mlp.BATCH,
    epochs=4,
    verbose=0,
    callbacks=[InThirdEpoch()],
    checkpoint_dir=os.path.join(folder, "checkpoints"),
)
result = {"epochs": len(history.epoch), "own_handler": own_handler}
if event == "slow":
    result["different_calls"] = different_calls()
    result["rows"] = len(model.predict(x[:50], batch_size=mlp.BATCH, verbose=0))
    result["handler"] = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
print("RESULT " + json.dumps(result), flush=True)
