"""Checkpoints and saved models of a strategy's variables: what is saved is what comes back."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.testing.asking import expect, quiet, replica
from tfdist_ext.testing.variable_checks import VariableChecks

__all__ = ["SavingChecks"]


class SavingChecks(VariableChecks):
    """Values that a step has written, so that no initial value passes for them."""

    def test_checkpoint(self) -> None:
        """`tf.train.Checkpoint`: saved, changed, restored in every copy."""
        count = self.replicas()
        total, matrix = count * (count + 1) / 2, [[1.0, 2.0], [3.0, 4.0]]
        module = self._module()
        self._write(module)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(module).save(f"{folder}/checkpoint")
            reader = tf.train.load_checkpoint(path)
            saved = {
                name: np.asarray(reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")).tolist()
                for name in ("matrix", "total", "counter")
                if reader.has_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")
            }
            right = {"matrix": matrix, "total": total, "counter": total}
            expect("what the checkpoint holds", saved, right)
            for variable in (module.matrix, module.total, module.counter):
                variable.assign(tf.zeros_like(variable))
            tf.train.Checkpoint(module).restore(path).assert_existing_objects_matched()
        self.expect_everywhere("a matrix restored", module.matrix, matrix)
        self.expect_everywhere("a sum restored", module.total, total)
        expect("a metric's sum restored", float(module.counter.numpy()), total)

    def test_checkpoint_before_the_variables(self) -> None:
        """Restored first, as Keras and tf.Module may do: variables are made with its values."""
        module = self._module()
        self._write(module)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(module).save(f"{folder}/checkpoint")
            later = tf.Module()
            with self.under_test().scope():
                tf.train.Checkpoint(later).restore(path)
                later.matrix = tf.Variable(tf.zeros([2, 2]))
        self.expect_everywhere("a matrix made later", later.matrix, [[1.0, 2.0], [3.0, 4.0]])

    def test_checkpoint_elsewhere(self) -> None:
        """A checkpoint goes to a program without a strategy, and comes from one."""
        module, plain = self._module(), tf.Module()
        self._write(module)
        plain.matrix, plain.total = tf.Variable(tf.zeros([2, 2])), tf.Variable(0.0)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(module).save(f"{folder}/of_the_strategy")
            tf.train.Checkpoint(plain).restore(path).assert_existing_objects_matched()
            right = [[1.0, 2.0], [3.0, 4.0]]
            expect("the matrix without a strategy", plain.matrix.numpy().tolist(), right)
            plain.matrix.assign([[5.0, 6.0], [7.0, 8.0]])
            path = tf.train.Checkpoint(plain).save(f"{folder}/of_none")
            tf.train.Checkpoint(module).restore(path)
        self.expect_everywhere("a matrix from elsewhere", module.matrix, [[5.0, 6.0], [7.0, 8.0]])

    def test_saved_model(self) -> None:
        """`tf.saved_model.save` writes the values once; what is loaded knows no strategy."""
        module = self._module()
        self._write(module)
        with tempfile.TemporaryDirectory() as folder, quiet():
            tf.saved_model.save(module, folder)
            loaded = tf.saved_model.load(folder)
        expect("the matrix loaded", loaded.matrix.numpy().tolist(), [[1.0, 2.0], [3.0, 4.0]])

    def _module(self) -> Any:
        on_read = tf.VariableSynchronization.ON_READ
        module: Any = tf.Module()
        module.matrix = self.variable(tf.zeros([2, 2]), "MEAN")
        module.total = self.variable(0.0, "SUM")
        module.counter = self.variable(0.0, "SUM", synchronization=on_read, trainable=False)
        return module

    def _write(self, module: Any) -> None:
        def step() -> None:
            module.matrix.assign([[1.0, 2.0], [3.0, 4.0]])
            module.total.assign(replica())
            module.counter.assign_add(replica())

        self.under_test().run(step)
