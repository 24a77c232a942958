"""Legacy tf_keras's fit under MultiWorkerMirroredStrategy; argument: steps_per_execution."""

import sys

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()

import tf_keras  # noqa: E402  (importing it starts TensorFlow)
import work  # noqa: E402

with strategy.scope():
    model = work.mlp(tf_keras)
    model.compile(
        "adam",
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=int(sys.argv[1]),
    )
x, y = work.data()
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1)
data = data.batch(work.GLOBAL_BATCH, drop_remainder=True).prefetch(2).with_options(options)
work.report_speed(lambda n: model.fit(data, epochs=n, verbose=0))
