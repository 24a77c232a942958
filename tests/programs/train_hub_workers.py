"""One worker of a cluster: trains a task of KerasHub on strings; reports what came out, as JSON."""

import json

import tfdist_ext as tfd

strategy = tfd.create_strategy()

import hub_tasks  # noqa: E402  (importing these first would start TensorFlow too early)
import keras  # noqa: E402
import numpy as np  # noqa: E402

keras.utils.set_random_seed(1)
model = tfd.distribute(lambda: hub_tasks.causal(lora=True), strategy)
history = model.fit(*hub_tasks.arrays(hub_tasks.causal), batch_size=8, verbose=0).history
result = {
    "loss": history["loss"],
    "weights": np.concatenate([v.numpy().ravel() for v in model.keras_model.weights]).tolist(),
    "generated": model.generate(["the f", "a"], max_length=8),
}
print("RESULT " + json.dumps(result))
