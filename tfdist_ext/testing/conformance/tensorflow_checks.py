"""TensorFlow's own contract tests of strategies, where its wheel ships them.

Those that need the iterators of TensorFlow 1 (make_input_fn_iterator, experimental_run) do not
apply to a public tf.distribute.Strategy, and are left out.
"""

from __future__ import annotations

from unittest import SkipTest

from tfdist_ext.testing.conformance._tf_private import contract_test, dataset_contract_test
from tfdist_ext.testing.conformance.strategy_case import StrategyCase

__all__ = ["TensorFlowChecks"]


class TensorFlowChecks(StrategyCase):
    """Each is one of TensorFlow's tests; with their numbers of replicas where they have one."""

    def test_tensorflow_minimize_loss(self) -> None:
        """Ten steps of gradients, `reduce_to` and `update` bring the loss down."""
        if self.replicas() > 4:  # it sums the gradients at a rate of 0.2, which grows beyond
            raise SkipTest("TensorFlow's test is for up to 4 replicas")
        contract_test("minimize_loss_eager", self.under_test())

    def test_tensorflow_minimize_loss_in_a_session(self) -> None:
        """The same in a session of TensorFlow 1."""
        devices = [name.split("device:")[-1] for name in self.under_test().extended.worker_devices]
        if devices != ["CPU:0"]:
            raise SkipTest("a session of TensorFlow 1 has CPU:0 alone")
        contract_test("minimize_loss_graph", self.under_test())

    def test_tensorflow_replica_id(self) -> None:
        """Each replica has a number of its own."""
        contract_test("replica_id", self.under_test())

    def test_tensorflow_exceptions(self) -> None:
        """Exceptions of nested steps and merge calls are raised."""
        contract_test("call_and_merge_exceptions", self.under_test())

    def test_tensorflow_summary(self) -> None:
        """The first replica alone writes summaries."""
        contract_test("summary_for_replica_zero_only", self.under_test())

    def test_tensorflow_trainable_variable(self) -> None:
        """Variables are trainable by default; those that are synchronized on read are not."""
        contract_test("trainable_variable", self.under_test())

    def test_tensorflow_global_step(self) -> None:
        """A counter that each replica adds 1 to is 1 more, for all of them."""
        contract_test("global_step_update", self.under_test())

    def test_tensorflow_run(self) -> None:
        """`run` on two replicas, with structures and its own results as arguments."""
        if self.replicas() != 2:
            raise SkipTest("TensorFlow's test is for 2 replicas")
        contract_test("run", self.under_test())
        contract_test("run", self.under_test(), run_in_function=True)

    def test_tensorflow_datasets_from_a_function(self) -> None:
        """An element for each replica, in order; iterated once and again."""
        dataset_contract_test(self.under_test())
