"""Legacy tf_keras's fit under ParameterServerStrategy."""

import embedding_work as work
import tensorflow as tf

work.serve()
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)

import tf_keras  # noqa: E402

with strategy.scope():
    model = tf_keras.Sequential(
        [
            tf_keras.Input((), dtype="int64"),
            tf_keras.layers.Embedding(work.ROWS, work.WIDTH),
            tf_keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")


creator = tf_keras.utils.experimental.DatasetCreator(lambda _: work.dataset())
work.report_speed(lambda n: model.fit(creator, epochs=n, steps_per_epoch=work.STEPS, verbose=0))
