"""Variables on three parameter servers, all in one process: where they are, and their values."""

import keras
import numpy as np
import own_servers
import tensorflow as tf

import tfdist_ext as tfd
from tfdist_ext.placement import OnTask, Rule, Sharded, placer
from tfdist_ext.training import _keras_private

cluster, servers = own_servers.serve(ps=3)
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
result = {}


def build(width=13):
    keras.utils.set_random_seed(7)
    users, items = keras.Input([1], name="user"), keras.Input([1], name="item")
    both = keras.layers.Concatenate()(
        [
            keras.layers.Flatten()(keras.layers.Embedding(1001, width, name="users")(users)),
            keras.layers.Flatten()(
                keras.layers.Embedding(
                    333, 7, name="items", embeddings_initializer="truncated_normal"
                )(items)
            ),
        ]
    )
    hidden = keras.layers.Dense(32, activation="relu", kernel_initializer="he_normal")(both)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dense(9, kernel_initializer="orthogonal")(hidden)
    hidden = keras.layers.Dropout(0.0, seed=1)(hidden)
    model = keras.Model([users, items], keras.layers.Dense(1)(hidden))
    model.compile(optimizer="adam", loss="mse")
    return model


x = [np.arange(64)[:, None] * 11 % 1001, np.arange(64)[:, None] * 5 % 333]
y = np.sin(np.arange(64.0))[:, None]


def places(model):
    """Path -> [(task, rows)] of every variable of the model and its optimizer, as it is live."""
    return {
        variable.path: of(_keras_private.raw_value(variable))
        for variable in [*model.variables, *model.optimizer.variables]
    }


def of(raw):
    pieces = list(raw.variables) if hasattr(raw, "variables") else [raw]
    return [
        [int(piece.device.split("task:")[1].split("/")[0]), piece.shape.as_list()[:1]]
        for piece in pieces
        if "/job:ps/" in piece.device
    ]


def expected(plan, model):
    """The same, as the plan says, slots beside their variables."""
    found = {}
    trainable = model.trainable_variables
    for variable in model.variables:
        if variable.path in {spec.path for spec in plan.specs}:
            shards = plan.shards_of(variable.path)
            rows = [[s.stop - s.start] if len(variable.shape) else [] for s in shards]
            found[variable.path] = [[s.task, r] for s, r in zip(shards, rows, strict=True)]
    for variable in trainable:
        for slot in model.optimizer.variables:
            if slot.path.startswith("adam/" + variable.path.replace("/", "_")):
                found[slot.path] = found[variable.path]
    for name in ("iteration", "learning_rate"):
        found[f"adam/{name}"] = [[plan.tasks_of(f"adam/{name}")[0], []]]
    return found


rules = [
    Rule("users/.*", Sharded(3)),
    Rule("items/embeddings", Sharded(2)),
    Rule("dense/kernel", OnTask(2)),
    Rule("dense_1/kernel", Sharded(3)),
]
strategy = tfd.create_strategy("parameter_server", cluster=resolver, placement=rules)
plain = build()  # connecting to a cluster ends the variables that were there
model = tfd.distribute(build, strategy)
before = [_keras_private.raw_value(v).numpy() for v in model.keras_model.weights]
result["same initial values"] = {
    v.path: bool(np.array_equal(a, b.numpy()))
    for v, a, b in zip(model.keras_model.weights, before, plain.weights, strict=True)
}
model.fit(x, y, batch_size=16, verbose=0)
plan = strategy.placement_plan
result["live"] = places(model.keras_model)
result["expected"] = expected(plan, model.keras_model)
result["learned like plan_placement"] = plan == tfd.plan_placement(build, ps=3, rules=rules)

placer._LARGE = 40_000  # bytes: as if these variables were large
by_default = tfd.create_strategy("parameter_server", cluster=resolver)
in_order = tfd.plan_placement(build, ps=3)
keras.utils.clear_session()  # the names of layers begin as in the plan
model = tfd.distribute(build, by_default)
result["same initial values"] |= {
    f"cut {v.path}": bool(np.array_equal(_keras_private.raw_value(v).numpy(), first))
    for v, first in zip(model.weights, before, strict=True)
}
model.fit(x, y, batch_size=16, verbose=0)
result["live by default"] = places(model)
result["expected by default"] = expected(in_order, model)
result["explained"] = str(tfd.explain(by_default))

free = tfd.create_strategy("parameter_server", cluster=resolver)
with free.scope(), free.scope():
    counters = [tf.Variable(tf.zeros([4]), name=f"counter_{i}") for i in range(6)]
result["one by one"] = [task for v in counters for task, _ in of(v)]
with free.scope():
    with tf.device("/job:ps/task:1"):
        asked = tf.Variable(tf.zeros([5]))
        layer = keras.layers.Dense(3, name="asked")
        layer.build([None, 4])
    result["asked"] = [of(asked), *(of(_keras_private.raw_value(v)) for v in layer.weights)]
planned = tfd.create_strategy("parameter_server", cluster=resolver, placement=plan)
result["refused"] = []
bytes_before = planned.placer.bytes_by_task.copy()
for refused in (
    lambda: tfd.distribute(lambda: build(width=5), planned),
    lambda: tfd.create_strategy(
        "parameter_server", cluster=resolver, placement=tfd.plan_placement(build, ps=2)
    ),
):
    try:
        refused()
    except tfd.PlacementError as error:
        result["refused"].append(str(error))
result["variables of the refused"] = sum(planned.placer.bytes_by_task) - sum(bytes_before)
