"""Reads one epoch of shuffled records with one method, or writes the record files.

Arguments: "write", "tfdist_ext", or the buffer size of a plain tf.data pipeline; "one" or "batch",
for what `parse` takes; folder, bytes of a record, records, records of a batch.
"""

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf
from own_memory import mebibytes, reset_peak

import tfdist_ext as tfd

FILES = 8
AUTOTUNE = tf.data.AUTOTUNE
contestant, kind, folder = sys.argv[1:4]
size, records, batch = map(int, sys.argv[4:])
files = [f"{folder}/{i}.tfrecord" for i in range(FILES)]


def write():
    for number, file in enumerate(files):
        with tf.io.TFRecordWriter(file) as writer:
            content = os.urandom(2 * size)
            for i in range(records * number // FILES, records * (number + 1) // FILES):
                writer.write(content[i % size :][:size])
    tfd.data.from_tfrecords(files, parse, global_batch_size=batch)  # makes the index


def parse(record):
    """Of one record, or of a vector of them: next to no work, so that reading is what is timed."""
    pixels = tf.io.decode_raw(record, tf.uint8)
    return tf.ensure_shape(pixels, [size] if kind == "one" else [None, size])


def epoch():
    if contestant == "tfdist_ext":
        return tfd.data.from_tfrecords(
            files, parse, global_batch_size=batch, seed=0, batched=kind == "batch"
        ).dataset()
    read = tf.data.TFRecordDataset(files, num_parallel_reads=AUTOTUNE)
    shuffled = read.shuffle(int(contestant), seed=0)
    if kind == "one":
        return shuffled.map(parse, AUTOTUNE).batch(batch).prefetch(AUTOTUNE)
    return shuffled.batch(batch).map(parse, AUTOTUNE).prefetch(AUTOTUNE)


def measure():
    started_up = tf.data.Dataset.range(100).shuffle(9).map(lambda i: i + 1, AUTOTUNE).batch(7)
    assert sum(len(numbers) for numbers in started_up) == 100
    before = mebibytes("VmRSS")
    reset_peak()
    making = time.perf_counter()
    data = epoch()
    started = time.perf_counter()
    batches = iter(data)
    seen = len(next(batches))
    first = time.perf_counter() - started
    behind = seen
    for rows in batches:
        seen += len(rows)
    seconds = time.perf_counter() - started
    assert seen == records
    print(
        f"made {started - making:.4f} first {first:.4f}"
        f" after {(seen - behind) / (seconds - first):.1f}"
        f" whole {seen / seconds:.1f} memory {mebibytes('VmHWM') - before:.1f}"
    )


write() if contestant == "write" else measure()
