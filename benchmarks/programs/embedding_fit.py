"""tfd.distribute(...).fit of keras.layers.Embedding on parameter servers, at its defaults."""

import embedding_work as work

work.serve()

import keras  # noqa: E402

import tfdist_ext as tfd  # noqa: E402


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


model = tfd.distribute(build, tfd.create_strategy("parameter_server"), lazy_updates=work.LAZY)
x, y = work.data()
work.report_speed(lambda n: model.fit(x, y, batch_size=work.BATCH, epochs=n, verbose=0))
