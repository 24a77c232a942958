"""Batches that processes of a tf.data service prepare, each for one of all the tasks that ask."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

import tensorflow as tf

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.data.pipelines import PY_FUNCTIONS, operations_of
from tfdist_ext.data.service_address import dispatcher_address, wait_for_dispatcher
from tfdist_ext.errors import DataError
from tfdist_ext.launch import DATA_SERVICE
from tfdist_ext.messages import shown
from tfdist_ext.user_frames import filter_traceback

__all__ = ["next_job_name", "through_service"]

_numbers = itertools.count()


@filter_traceback
def through_service(
    dataset: tf.data.Dataset,
    *,
    service: str | None = None,
    job_name: str | None = None,
    wait: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> tf.data.Dataset:
    """The batches of a data set as a tf.data service prepares them, shared out over all tasks.

    Each task of the run calls this for the same data set, and iterates over what it returns. Then:

    - The n-th pass of all tasks is one pass over the data: each example is in exactly one batch,
      each batch goes to exactly one task, the first that asks, in no order; shares differ in size,
      and can be empty. A pass begins with each `iter()`, so to look at one batch of it is a
      pass too, and those of this task and of the others are then no longer the same.
    - A task may be in a later pass than others. One that joins a pass late gets what is left.
    - Each data worker makes batches of the elements it is dealt, so that there is a last, smaller
      batch a worker; with `drop_remainder=True` each of these is lost.
    - What a stopped task had fetched is lost. So is what a data worker that is killed has in work:
      at most once, never twice. `tfdist run` ends the run then; without it, the pass waits until
      a worker is started at the same address.
    - A job lives as long as its dispatcher. A program that starts anew on a living dispatcher, with
      the same job name, continues the passes of the last one, the finished ones being empty:
      give each run a name of its own.

    The source's elements (files, rows, numbers) are what is dealt out, one a request: what counts
    them after the source (`take`, `skip`, `enumerate`) counts on each data worker for itself.

    Args:
        dataset: of batches, the same on every task. It is run in other processes: no Python
            functions (`from_generator`, `numpy_function`, `py_function`); its files are to be
            readable there.
        service: "grpc://host:port" of the dispatcher; None: what TFDIST_DATA_SERVICE says, which
            `tfdist run --data-workers N` sets.
        job_name: what the tasks that share have in common, and no other data set on this
            dispatcher has: TensorFlow would give both the batches of the first. None: the number
            of this call in the process; an evaluator has names of its own.
        wait: seconds for the dispatcher to answer.
        env: environment variables with TFDIST_DATA_SERVICE and the cluster; None: those of this
            process.

    Returns:
        A data set of the same `element_spec`, of unknown cardinality (where it is not infinite),
        which strategies do not shard again.

    Raises:
        DataError: no service, an invalid address, no answer, a data set that runs Python.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise DataError(f"dataset must be a tf.data.Dataset, got {shown(dataset)}.")
    if job_name is not None and (not isinstance(job_name, str) or not job_name):
        raise DataError(f"job_name must be a text that is not empty, got {shown(job_name)}.")
    env = os.environ if env is None else env
    address = _address(service, env)
    if found := sorted(operations_of(dataset) & PY_FUNCTIONS):
        raise DataError(
            f"the data set must run without Python functions, got {', '.join(found)}: the workers"
            " of a tf.data service do not have this process's Python. Write what from_generator,"
            " numpy_function or py_function does with TensorFlow's own operations, or do it after"
            " through_service."
        )
    wait_for_dispatcher(address, wait)
    return dataset.apply(
        tf.data.experimental.service.distribute(
            processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
            service=f"grpc://{address}",
            job_name=next_job_name(env) if job_name is None else job_name,
        )
    )


def _address(service: str | None, env: Mapping[str, str]) -> str:
    if service is not None:
        return dispatcher_address(service)
    if env.get(DATA_SERVICE):
        return dispatcher_address(env[DATA_SERVICE], DATA_SERVICE)
    raise DataError(
        f"a tf.data service must be given, got no `service`, and {DATA_SERVICE} is not set. Start"
        " the script with: tfdist run --data-workers 2 -- python script.py; on several machines,"
        " start tf.data.experimental.service servers (or python -m"
        ' tfdist_ext.data.service_process), and give service="grpc://host:port" of the dispatcher.'
    )


def next_job_name(env: Mapping[str, str] | None = None) -> str:
    """The name of the next job: the same on all tasks that ask in the same order."""
    config = ClusterConfig.from_env(env)  # None: this process's
    # An evaluator runs the same program: under the same name it would take batches away.
    evaluates = config is not None and config.task.type == "evaluator"
    return f"{'evaluator' if evaluates else 'training'}-{next(_numbers)}"
