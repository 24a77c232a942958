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
    """Rows that are numbers of their own, so that each can be looked for."""

    def test_distribute_dataset(self) -> None:
        """The replicas' parts of a batch, one after the other, are the batch; the last is short."""
        self._expect_cut(None)

    def test_distribute_dataset_not_fetched(self) -> None:
        """The same with an option: parts are left on the host."""
        self._expect_cut(tf.distribute.InputOptions(experimental_fetch_to_device=False))

    def test_distribute_a_structure(self) -> None:
        """Dicts and tuples keep their structure, and what belongs together stays together."""
        strategy, size = self.under_test(), 2 * self.replicas()
        rows = tf.data.Dataset.range(size).map(lambda x: ({"x": x}, 10 * x)).batch(size)
        for features, labels in strategy.experimental_distribute_dataset(rows):
            features, labels = local_values(strategy, features["x"]), local_values(strategy, labels)
            expect_equal("all rows", list(chain(*features)), list(range(size)))
            expect_equal("labels", labels, [[10 * x for x in part] for part in features])

    def test_distributed_dataset_in_a_function(self) -> None:
        """Looped over in a tf.function, once and again: each row is counted once."""
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
        """`distribute_datasets_from_function`: the context says whose rows; all come once."""
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

    def _expect_cut(self, options: tf.distribute.InputOptions | None) -> None:
        strategy, size = self.under_test(), 2 * self.replicas()
        rows = tf.data.Dataset.range(2 * size - 1).batch(size)
        distributed = strategy.experimental_distribute_dataset(rows, options)
        parts = [local_values(strategy, batch) for batch in distributed]
        joined = [list(chain(*batch)) for batch in parts]
        expect_equal("rows of each batch", joined, [[*range(size)], [*range(size, 2 * size - 1)]])
        expect_equal("how many each replica has", [len(p) for p in parts[0]], [2] * self.replicas())

    def _counted(self, distributed: Any) -> tuple[Any, Any]:
        strategy = self.under_test()
        rows, total = tf.constant(0), tf.constant(0, tf.int64)
        for batch in distributed:
            each = strategy.run(lambda x: (tf.size(x), tf.reduce_sum(x)), args=(batch,))
            rows += strategy.reduce("SUM", each[0], axis=None)
            total += strategy.reduce("SUM", each[1], axis=None)
        return rows, total
