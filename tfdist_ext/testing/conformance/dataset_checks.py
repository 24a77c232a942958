"""What replicas get of a dataset: each example once, in the order of the global batches."""

from __future__ import annotations

from itertools import chain
from typing import Any

import tensorflow as tf

from tfdist_ext.testing.conformance.strategy_case import (
    StrategyCase,
    expect_equal,
    ignore_known_warnings,
    local_values,
)

__all__ = ["DatasetChecks"]


class DatasetChecks(StrategyCase):
    """Each row is a number of its own, so that no row can be lost or doubled unseen."""

    def test_distribute_dataset(self) -> None:
        """The parts of the replicas, in their order, are the global batch; the last is short."""
        strategy, size = self.under_test(), 2 * self.replicas()
        rows = tf.data.Dataset.range(2 * size - 1).batch(size)
        distributed = strategy.experimental_distribute_dataset(rows)
        parts = [local_values(strategy, batch) for batch in distributed]
        joined = [list(chain(*batch)) for batch in parts]
        expect_equal("rows of each batch", joined, [[*range(size)], [*range(size, 2 * size - 1)]])
        expect_equal("how many each replica has", [len(p) for p in parts[0]], [2] * self.replicas())

    def test_distributed_dataset_in_a_function(self) -> None:
        """A loop in a tf.function sees each row once, also when the function runs again."""
        strategy, size = self.under_test(), 2 * self.replicas()
        rows = tf.data.Dataset.range(3 * size - 1).batch(size)
        distributed = strategy.experimental_distribute_dataset(rows)
        count = tf.function(self._counted)
        right = [3 * size - 1, sum(range(3 * size - 1))]
        for time in ("the first time", "again"):
            with ignore_known_warnings():
                counted = [int(number) for number in count(distributed)]
            expect_equal(f"(rows, their sum), {time}", counted, right)

    def test_datasets_from_a_function(self) -> None:
        """`distribute_datasets_from_function`: the context gives the shard, each row comes once."""
        strategy, count = self.under_test(), self.replicas()
        seen: list[Any] = []

        def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
            seen.append(context)
            rows = tf.data.Dataset.range(4 * count)
            shard = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
            return shard.batch(context.get_per_replica_batch_size(2 * count))

        distributed = strategy.distribute_datasets_from_function(pipeline)
        parts = [local_values(strategy, batch) for batch in distributed]
        pipelines = [context.input_pipeline_id for context in seen]
        expect_equal("numbers of pipelines", pipelines, list(range(seen[0].num_input_pipelines)))
        expect_equal(
            "replicas that the context tells", {c.num_replicas_in_sync for c in seen}, {count}
        )
        each = [[len(part) for part in batch] for batch in parts]
        expect_equal("rows of each replica in each step", each, [[2] * count] * 2)
        rows = sorted(row for batch in parts for part in batch for row in part)
        expect_equal("all rows", rows, list(range(4 * count)))

    def _counted(self, distributed: Any) -> tuple[Any, Any]:
        strategy = self.under_test()
        rows, total = tf.constant(0), tf.constant(0, tf.int64)
        for batch in distributed:
            each = strategy.run(lambda x: (tf.size(x), tf.reduce_sum(x)), args=(batch,))
            rows += strategy.reduce("SUM", each[0], axis=None)
            total += strategy.reduce("SUM", each[1], axis=None)
        return rows, total
