"""A worker of a cluster that shares the optimizer: all optimizers, saving, restoring; as JSON.

Argument: a directory that all workers share, for a few optimizers and everything else. Without it,
all optimizers are tried, and nothing else.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import tfdist_ext as tfd

strategy = tfd.create_strategy(shard_optimizer=True, bucket_bytes=400)

import keras  # noqa: E402  (importing these first would start TensorFlow too early)
import numpy as np  # noqa: E402
import sharded_optimizer_models as models  # noqa: E402

from tfdist_ext.training.model import distribute_on  # noqa: E402
from tfdist_ext.training.state import whole_slots  # noqa: E402
from tfdist_ext.training.variables import default_strategy, sharded_slots  # noqa: E402

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
result = {"explain": str(tfd.explain(strategy)), "optimizers": {}}


def whole_variables(model):
    """All variables of the optimizer, as one device has them."""
    with whole_slots(model._tfdist_ext.reduction, model.keras_model, everywhere=True):
        return [np.asarray(each) for each in model.keras_model.optimizer.variables]


def difference(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in pairs)


def weights_of(model):
    return [np.asarray(each) for each in getattr(model, "keras_model", model).weights]


def trained(build, **options):
    """A new model from the same weights, trained on one device and on all workers."""
    keras.utils.set_random_seed(1)
    plain = build()
    if options.get("lazy_updates"):
        plain = distribute_on(plain, default_strategy(), **options)
    plain.fit(*models.data(), **models.FIT)
    keras.utils.set_random_seed(1)
    ours = tfd.distribute(build, strategy, **options)
    ours.fit(*models.data(), **models.FIT)
    return plain, ours


for name in models.KINDS if sys.argv[1:] else models.OPTIMIZERS:
    make = models.OPTIMIZERS[name]
    options = {"lazy_updates": name.startswith("lazy")}
    plain, ours = trained(lambda make=make: models.build(make()), **options)
    slots = sharded_slots(ours.keras_model.optimizer)
    result["optimizers"][name] = {
        "weights": difference(weights_of(ours), weights_of(plain)),
        "variables": difference(whole_variables(ours), plain.optimizer.variables),
        "explain": str(tfd.explain(ours)),
        "own": sum(np.prod(slot.variable.shape, dtype=int).item() for slot in slots),
        "all": sum(np.prod(slot.shape, dtype=int).item() for slot in slots),
    }


def build_adam():
    return models.build(keras.optimizers.Adam(0.01))


def told(model, callback):
    try:
        model.fit(*models.data(), **models.FIT, callbacks=[callback])
    except tfd.TfDistError as error:
        return str(error)


def steps_and_files(shared):
    """Other steps, files of all kinds, models that exist already, callbacks, and verify."""
    # A step of the user's own, which clips; and an eager one.
    for name, build in (("own step", models.build_own_step), ("eager", models.build_eager)):
        plain, ours = trained(build)
        result[name] = difference(weights_of(ours), weights_of(plain))

    # An optimizer of the user's own may combine what the workers have apart.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        plain, ours = trained(lambda: models.build(models.OfOneWeight(0.1)))
    result["own optimizer"] = difference(weights_of(ours), weights_of(plain))
    result["warned of own"] = [str(each.message) for each in warned]
    of_all_weights = models.OfAllWeights(0.1, momentum=0.9)
    refused, result["refused"] = tfd.distribute(models.build(of_all_weights), strategy), []
    for _ in range(2):
        try:
            refused.fit(*models.data())
        except tfd.TrainingError as error:
            result["refused"].append(str(error))

    # Files: written whole, by the chief; restored by any number of workers.
    plain, ours = trained(build_adam)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours.save(shared / "model.keras")
        ours.save_checkpoint(shared / "two.ckpt")
        ours.save_weights(shared / "two.weights.h5")
    result["warned"] = [
        str(each.message) for each in warned if "shard_optimizer" in str(each.message)
    ]
    loaded = keras.models.load_model(shared / "model.keras", compile=True)
    result["loaded"] = difference(loaded.optimizer.variables, plain.optimizer.variables)
    again = tfd.distribute(build_adam, strategy)
    result["restored step"] = again.restore_checkpoint(shared / "one.ckpt").step  # one device's
    again.fit(*models.data(), **models.FIT)
    result["continued"] = [each.astype(float).tolist() for each in weights_of(again)]
    again = tfd.distribute(build_adam, strategy)
    again.fit(*models.data(), **models.FIT)
    again.load_weights(shared / "two.weights.h5")
    result["load_weights"] = difference(whole_variables(again), plain.optimizer.variables)

    # A trained model of each worker's own: the chief's counts.
    keras.utils.set_random_seed(20 + rank)
    own = build_adam()
    own.fit(*models.data(), **models.FIT)
    result["own"] = [float(np.abs(np.asarray(each)).sum()) for each in own.optimizer.variables]
    adopted = tfd.distribute(own, strategy)
    result["adopted"] = [float(np.abs(each).sum()) for each in whole_variables(adopted)]

    result["swap"] = told(ours, keras.callbacks.SwapEMAWeights())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result["checkpoint"] = told(
            ours, keras.callbacks.ModelCheckpoint(shared / "callback.keras")
        )
    result["warned_by_callback"] = [str(each.message) for each in warned]
    result["verified"] = str(tfd.verify(build_adam, models.data(), strategy, batch_size=16))


if sys.argv[1:]:
    steps_and_files(Path(sys.argv[1]))
