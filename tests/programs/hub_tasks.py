"""Tiny tasks of KerasHub with random weights, and sentences to train them on."""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

WORDS = ["the", "quick", "brown", "fox", "jumped", "over", "a", "lazy", "dog"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
RNG = np.random.default_rng(0)
TEXTS = np.array([" ".join(RNG.choice(WORDS, RNG.integers(2, 6))) for _ in range(12)])
LABELS = np.array([int("fox" in text) for text in TEXTS])
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 4, "intermediate_dim": 8, "dropout": 0.0}


def classifier():
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=BERT)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(BERT), max_sequence_length=8, **SIZES
    )
    backbone.enable_lora(2)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    return model


def causal():
    letters = sorted({*"".join(WORDS), "Ġ", "th"})
    vocabulary = {name: i for i, name in enumerate(["<|endoftext|>", *letters])}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["t h"])
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(vocabulary), max_sequence_length=8, **SIZES
    )
    backbone.enable_lora(2)
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)
    model.compile(keras.optimizers.Adam(0.01), sampler="greedy", jit_compile=False)
    return model


def labeled_texts():
    """Batches of strings and labels for the classifier."""
    return tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(8)
