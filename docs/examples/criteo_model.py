"""A recommender for the 26 categories of the Criteo data, with 33.8 million rows.

tfdist plan docs/examples/criteo_model.py:build --ps 4 --optimizer adam
"""

import keras

# The number of values of each category, as published by the authors of DLRM for Kaggle's data set.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
WIDTH = 64


def build(most_rows: int = max(CRITEO_ROWS)) -> keras.Model:
    """Returns a model with a table for each category and an MLP for 13 numbers.

    Args:
        most_rows: tables have at most this number of rows. The ids must be smaller.
    """
    numbers = keras.Input([13], name="numbers")
    ids = keras.Input([len(CRITEO_ROWS)], dtype="int32", name="ids")
    parts = [keras.layers.Dense(WIDTH, activation="relu")(numbers)]
    for category, values in enumerate(CRITEO_ROWS):
        table = keras.layers.Embedding(min(values, most_rows), WIDTH, name=f"table_{category}")
        parts.append(table(ids[:, category]))
    hidden = keras.layers.Concatenate()(parts)
    for width in (512, 256):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model({"numbers": numbers, "ids": ids}, outputs, name="recommender")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    auc = keras.metrics.AUC(from_logits=True, name="auc")
    model.compile(keras.optimizers.Adagrad(0.05), loss, metrics=[auc])
    return model
