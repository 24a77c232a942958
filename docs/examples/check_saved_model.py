"""Load saved models with plain Keras, without tfdist_ext, and check their accuracy.

python docs/examples/check_saved_model.py runs/digits_multi_worker
"""

import json
import sys
from pathlib import Path

import digits_data
import keras


def check(directory: Path) -> None:
    expected = json.loads((directory / "result.json").read_text())
    model = keras.models.load_model(directory / "model.keras")
    _, (x_test, y_test) = digits_data.load(expected["dataset"])
    _, accuracy = model.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0)
    assert "tfdist_ext" not in sys.modules
    events = list((directory / "events").rglob("events.out.tfevents.*"))
    print(
        f"plain Keras loads {directory / 'model.keras'}: test accuracy {accuracy:.4f},"
        f" in training {expected['test_accuracy']:.4f}; TensorBoard event files: {len(events)}"
    )
    if abs(accuracy - expected["test_accuracy"]) > 1e-6:
        raise SystemExit("the accuracy differs from the accuracy in training")
    if not events:
        raise SystemExit(f"there are no TensorBoard event files in {directory / 'events'}")


if not sys.argv[1:]:
    raise SystemExit("Pass the folder of a saved model, such as runs/digits_multi_worker.")
for name in sys.argv[1:]:
    check(Path(name))
