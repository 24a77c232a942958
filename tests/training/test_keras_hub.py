"""KerasHub's tasks, whose `fit` makes tokens of strings: the same training as on one device."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from training_cases import assert_same_history, assert_same_weights, mirrored

import tfdist_ext as tfd

pytest.importorskip("keras_hub")  # which takes the newest Keras only
sys.path.append(str(Path(__file__).parents[1] / "programs"))
import hub_tasks

PROMPTS = ["the f", "a"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning"),  # of BERT's pooler
    pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.mark.long
def test_a_text_classifier_with_lora_on_datasets_of_strings() -> None:
    data = hub_tasks.labeled_texts()
    fit = {"validation_data": data, "epochs": 2, "verbose": 0}
    keras.utils.set_random_seed(1)
    one = hub_tasks.classifier()
    one.run_eagerly = True  # quicker than compiling
    expected = one.fit(data, **fit).history
    keras.utils.set_random_seed(1)
    ours = tfd.distribute(hub_tasks.classifier, mirrored())
    history = ours.fit(data, **fit).history
    assert list(expected) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert_same_history(expected, history)
    assert_same_weights(one, ours)
    texts = hub_tasks.TEXTS[:7]
    np.testing.assert_allclose(
        ours.predict(texts, verbose=0), one.predict(texts, verbose=0), atol=1e-6
    )


def test_an_existing_task_comes_along_with_its_tokenizer_and_sampler() -> None:
    one = hub_tasks.causal()
    one.run_eagerly = True  # quicker than compiling
    ours = tfd.distribute(one, mirrored())
    assert type(ours.keras_model) is type(one)
    assert type(ours.sampler) is type(one.sampler)
    assert ours.generate(PROMPTS, max_length=8) == one.generate(PROMPTS, max_length=8)
    assert_same_weights(one, ours)
