"""One worker of a cluster: trains KerasHub's tasks on strings; reports what came out, as JSON."""

import json

import tfdist_ext as tfd

strategy = tfd.create_strategy()

import hub_tasks  # noqa: E402  (importing these first would start TensorFlow too early)
import keras  # noqa: E402
import numpy as np  # noqa: E402

result = {}
for task in (hub_tasks.classifier, hub_tasks.causal):
    keras.utils.set_random_seed(1)
    model = tfd.distribute(lambda task=task: task(lora=True), strategy)
    history = model.fit(*hub_tasks.arrays(task), batch_size=8, verbose=0).history
    weights = np.concatenate([v.numpy().ravel() for v in model.keras_model.weights])
    result[task.__name__] = {"loss": history["loss"], "weights": weights.tolist()}
result["generated"] = model.generate(["the f", "a"], max_length=8)
print("RESULT " + json.dumps(result))
