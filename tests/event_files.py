"""TensorBoard's event files, read without TensorBoard."""

from __future__ import annotations

import re
from pathlib import Path


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, of all event files in a folder."""
    import tensorflow as tf

    found: dict[str, dict[int, float]] = {}
    # Their names have the time and a counter, as numbers: the tenth of a process is not its second.
    numbers = {file: [int(n) for n in re.findall(r"\d+", file.name)] for file in folder.iterdir()}
    for file in sorted(numbers, key=lambda file: (numbers[file], file.name)):
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, {})[event.step] = number
    return found
