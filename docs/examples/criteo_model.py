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


def build() -> keras.Model:
    """Returns a model with a table for each category and an MLP for 13 numbers."""
    numbers = keras.Input([13], name="numbers")
    inputs, parts = [numbers], [keras.layers.Dense(WIDTH, activation="relu")(numbers)]
    for number, rows in enumerate(CRITEO_ROWS):
        ids = keras.Input([], dtype="int32", name=f"category_{number}")
        inputs.append(ids)
        parts.append(keras.layers.Embedding(rows, WIDTH, name=f"table_{number}")(ids))
    hidden = keras.layers.Concatenate()(parts)
    for width in (512, 256):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden), name="recommender")
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model
