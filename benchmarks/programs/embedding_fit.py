"""tfd.distribute(...).fit of keras.layers.Embedding on parameter servers.

A table of any size is cut into two pieces, as tables of 64 MiB are by default.
"""

import embedding_work as work

work.serve()

import keras  # noqa: E402

import tfdist_ext as tfd  # noqa: E402
from tfdist_ext.placement import Rule, Sharded  # noqa: E402


def build():
    model = keras.Sequential(
        [
            keras.Input((), dtype="int64"),
            keras.layers.Embedding(work.ROWS, work.WIDTH),
            keras.layers.Dense(1),
        ]
    )
    model.compile(work.OPTIMIZER, "mse")
    return model


rules = [Rule(".*embeddings", Sharded(2))]
strategy = tfd.create_strategy("parameter_server", placement=rules)
model = tfd.distribute(build, strategy, lazy_updates=work.LAZY)
x, y = work.data()
work.report_speed(lambda n: model.fit(x, y, batch_size=work.BATCH, epochs=n, verbose=0))
