"""The data sets of the example: images scaled to [0, 1] with one channel, and labels 0 to 9."""

import fcntl
import tempfile
from pathlib import Path

import keras
import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]


def load(name: str) -> tuple[Arrays, Arrays]:
    """Returns ((images, labels) for training, (images, labels) for testing)."""
    if name == "digits":
        return _digits()
    if name not in ("mnist", "fashion_mnist"):
        raise SystemExit(f"dataset must be digits, mnist or fashion_mnist, got {name!r}")
    # Workers on one machine share Keras's cache, so only one worker downloads.
    with open(Path(tempfile.gettempdir()) / f"tfdist_{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            train, test = getattr(keras.datasets, name).load_data()
        except Exception as error:
            message = f"Keras cannot download {name}: {error}. Without a network use digits."
            raise SystemExit(message) from error
    return tuple((_scaled(images, 255), labels.astype("int32")) for images, labels in (train, test))


def _digits() -> tuple[Arrays, Arrays]:
    """1,797 real images of 8 x 8, bundled in scikit-learn: 1,440 to train, 357 to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = _scaled(digits.images, 16)[order], digits.target[order].astype("int32")
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


def _scaled(images: np.ndarray, top: int) -> np.ndarray:
    return (images / top).astype("float32")[..., np.newaxis]
