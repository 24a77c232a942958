"""TF_CONFIG, TensorFlow's own description of a cluster: read from JSON and written to it.

    {"cluster": {"worker": ["10.0.0.5:2222", "10.0.0.6:2222"], "ps": ["10.0.0.7:2222"]},
     "task": {"type": "worker", "index": 0},
     "rpc_layer": "grpc"}

This module knows the shape of the text; what a cluster may be is decided in `jobs`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tfdist_ext.cluster.jobs import ClusterDescription, Jobs, Task
from tfdist_ext.messages import nearest, refuse, shown

_KEYS = ("cluster", "task", "rpc_layer")
_TASK_KEYS = ("type", "index")
# Estimators read "environment", and Google Cloud adds the others. None describes the cluster.
_FOREIGN_KEYS = frozenset({"environment", "job"})
_FOREIGN_TASK_KEYS = frozenset({"trial", "cloud"})
_CLUSTER_EXAMPLE = 'Add "cluster": {"worker": ["host:port"]}.'
_TASK_EXAMPLE = 'Add "task": {"type": "worker", "index": 0}.'


def parse(text: object, where: str) -> ClusterDescription:
    """Reads a TF_CONFIG; `where` opens every message.

    Raises:
        ClusterConfigError: the text is no TF_CONFIG, or its jobs break a rule of `Jobs`.
    """
    if not isinstance(text, str):
        raise refuse(where, "is not a string", text, "Pass a JSON string, as from json.dumps.")
    if not text.strip():
        advice = "If there is no cluster, unset it: ClusterConfig.from_env then returns None."
        raise refuse(where, "is empty", text, advice)
    value = load_json(text, where)
    if not isinstance(value, dict):
        advice = 'Write {"cluster": {...}, "task": {...}}.'
        raise refuse(where, "must be a JSON object", value, advice)
    if "sparseCluster" in value:
        advice = "Set enableDynamicWorker: false in the TFJob."
        what = "sparseCluster lists only some tasks, and strategies need all of them"
        raise refuse(where, what, value["sparseCluster"], advice)
    _refuse_unknown(value, _KEYS, _FOREIGN_KEYS, "the top level", where)
    if value.get("rpc_layer") not in (None, "grpc"):
        advice = 'Write "grpc", or remove rpc_layer.'
        what = "rpc_layer is no protocol of TensorFlow"
        raise refuse(where, what, value["rpc_layer"], advice)
    jobs, task = _jobs(value, where), _task(value, where)
    return ClusterDescription(jobs, task, where)


def load_json(text: str, where: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ClusterConfigError: the text is not JSON, or has a key twice in one object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            what = f"the key {shown(twice)} appears twice in one object"
            raise refuse(where, what, pairs, "Keep one.")
        return value

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        what = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        advice = "Check double quotes, commas and closing braces, or use json.dumps."
        raise refuse(where, what, near, advice) from None
    except RecursionError:
        what = "is nested too deeply"
        raise refuse(where, what, text[:40], "A cluster has three levels.") from None


def parse_variable(env: Mapping[str, str]) -> ClusterDescription | str:
    """The cluster TF_CONFIG describes; unset, empty and white space only mean none.

    A single worker in TF_CONFIG is still a cluster.
    """
    text = env.get("TF_CONFIG")
    if text is None:
        return "TF_CONFIG is not set"
    return parse(text, "TF_CONFIG") if text.strip() else "TF_CONFIG is empty"


def dump(jobs: Mapping[str, tuple[str, ...]], task: Task) -> str:
    """The TF_CONFIG text."""
    return json.dumps({"cluster": jobs, "task": {"type": task.type, "index": task.index}})


def _refuse_unknown(
    value: dict[str, Any], known: tuple[str, ...], foreign: frozenset[str], path: str, where: str
) -> None:
    for key in value:
        if key not in known and key not in foreign:
            raise refuse(where, f"{path} has an unknown key", key, nearest(key, known))


def _jobs(value: dict[str, Any], where: str) -> Jobs:
    if "cluster" not in value:
        raise refuse(where, "cluster is missing", value, _CLUSTER_EXAMPLE)
    return Jobs(value["cluster"], where)


def _task(value: dict[str, Any], where: str) -> Task:
    if "task" not in value:
        raise refuse(where, "task is missing", list(value), _TASK_EXAMPLE)
    task = value["task"]
    if not isinstance(task, dict):
        advice = 'Write {"type": "worker", "index": 0}.'
        raise refuse(where, "task must be a JSON object", task, advice)
    _refuse_unknown(task, _TASK_KEYS, _FOREIGN_TASK_KEYS, "task", where)
    for key in _TASK_KEYS:
        if key not in task:
            raise refuse(where, f"task.{key} is missing", task, _TASK_EXAMPLE)
    index = task["index"]
    is_number = isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index)
    return Task(task["type"], int(index) if is_number else index)
