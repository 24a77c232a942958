"""TF_CONFIG values that cannot be right, and what is said about each."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import ClusterConfigError


class Bad(NamedTuple):
    reason: str
    text: str
    fragment: str  # of the message, and of no other one
    arrived: str  # what the message shows of the value


def _config(cluster: Any, task: Any = None, **more: Any) -> str:
    task = {"type": "worker", "index": 0} if task is None else task
    return json.dumps({"cluster": cluster, "task": task, **more})


def _workers(*addresses: Any) -> str:
    return _config({"worker": list(addresses)})


def _task(**task: Any) -> str:
    return _config({"worker": ["a:1", "b:1"]}, task)


BAD_TF_CONFIGS = (
    # The text
    Bad("not JSON at all", "worker", "not JSON at line 1, column 1", "'worker'"),
    Bad("Python quotes", "{'cluster': {}}", "not JSON at line 1, column 2", "{'cluster': {}}"),
    Bad("a list, taken for a single process by TensorFlow", "[]", "must be a JSON object", "[]"),
    Bad("JSON twice encoded", json.dumps(_workers("a:1")), "must be a JSON object", "cluster"),
    Bad("a key twice", '{"cluster": {}, "cluster": {}}', "key 'cluster' appears twice", "cluster"),
    Bad("NaN", '{"cluster": NaN}', "cluster must map job names", "nan"),
    Bad("nested 100,000 deep", "[" * 100_000, "nested too deeply", "[[[["),
    # The top level
    Bad("no cluster", '{"task": {"type": "worker", "index": 0}}', "cluster is missing", "'index'"),
    Bad(
        "some of the tasks, as Kubeflow lists them for dynamic workers",
        '{"sparseCluster": {"worker": {"0": "a:1"}}, "task": {"type": "worker", "index": 0}}',
        "Set enableDynamicWorker: false",
        "{'0': 'a:1'}",
    ),
    Bad("a misspelt key", '{"clusters": {}}', 'Did you mean "cluster"?', "'clusters'"),
    Bad("the cluster is a list", _config(["a:1"]), "cluster must map job names", "['a:1']"),
    Bad("an empty cluster", _config({}), "cluster is empty", "{}"),
    Bad("another protocol", _config({}, rpc_layer="mpi"), "rpc_layer is no protocol", "'mpi'"),
    # Jobs
    Bad("a misspelt job", _config({"wroker": ["a:1"]}), 'Did you mean "worker"?', "'wroker'"),
    Bad(
        "a job of another system",
        _config({"launcher": ["a:1"]}),
        "Use one of: chief, worker, ps, evaluator.",
        "'launcher'",
    ),
    Bad("the old name of the chief", _config({"master": ["a:1"]}), 'Use "chief"', "'master'"),
    Bad("an empty job", _config({"worker": []}), "cluster.worker must be a list", "[]"),
    Bad("one address without a list", _config({"worker": "a:1"}), "must be a list", "'a:1'"),
    Bad(
        "two chiefs",
        _config({"chief": ["a:1", "b:1"]}, {"type": "chief", "index": 0}),
        "must have one address",
        "('a:1', 'b:1')",
    ),
    Bad(
        "ps without workers",
        _config({"ps": ["a:1"], "chief": ["b:1"]}, {"type": "chief", "index": 0}),
        "cluster.ps needs workers",
        "'ps': ('a:1',)",
    ),
    Bad(
        "some of the tasks of a job",
        _config({"worker": {"1": "a:1"}}),
        "cluster.worker must be a list",
        "{'1': 'a:1'}",
    ),
    # Addresses
    Bad("no port", _workers("a:1", "node7"), "cluster.worker[1] has no port", "'node7'"),
    Bad("a port in words", _workers("a:http"), "worker[0] has an invalid port", "'a:http'"),
    Bad("port 65536", _workers("a:65536"), "worker[0] has an invalid port", "'a:65536'"),
    Bad("no host", _workers(":2222"), "cluster.worker[0] has no host", "':2222'"),
    Bad("an empty address", _workers("a:1", ""), "cluster.worker[1] is blank", "''"),
    Bad("an address is a port", _workers(2222), "cluster.worker[0] is not a string", "2222"),
    Bad("white space in an address", _workers("a:1 "), "has white space in it", "'a:1 '"),
    Bad("a scheme", _workers("grpc://a:1"), "has a scheme", "'grpc://a:1'"),
    Bad("a host with a slash", _workers("a/b:1"), "name with invalid characters", "'a/b:1'"),
    Bad("IPv6 without brackets", _workers("::1:2222"), "IPv6 host in brackets", "'::1:2222'"),
    Bad("an invalid IPv6 address", _workers("[::g]:1"), "not a valid IPv6", "'[::g]:1'"),
    Bad("an invalid IPv4 address", _workers("10.0.0.256:1"), "not a valid IPv4", "'10.0.0.256:1'"),
    Bad(
        "one address twice, which hangs TensorFlow",
        _workers("a:1", "b:1", "a:1"),
        "cluster.worker[2] has the same address as cluster.worker[0]",
        "'a:1'",
    ),
    Bad(
        "one IPv6 address in two spellings",
        _workers("[::1]:1", "[0:0::1]:1"),
        "cluster.worker[1] has the same address as cluster.worker[0]",
        "'[0:0::1]:1'",
    ),
    # The task
    Bad("no task", '{"cluster": {"worker": ["a:1"]}}', "task is missing", "['cluster']"),
    Bad(
        "the task is a text", _config({"worker": ["a:1"]}, "worker:0"), "task must be a", "worker:0"
    ),
    Bad("no task type", _task(index=0), "task.type is missing", "{'index': 0}"),
    Bad("a negative index", _task(type="worker", index=-1), "task.index must be from 0 to 1", "-1"),
    Bad("a boolean index", _task(type="worker", index=True), "task.index must be a whole", "True"),
    Bad("an index past the end", _task(type="worker", index=2), "must be from 0 to 1", "2"),
    Bad("a task of no job", _task(type="ps", index=0), "cluster has no such job", "['worker']"),
)


def message_of(text: str) -> str:
    """What ClusterConfig says about a bad value."""
    try:
        config = ClusterConfig.from_tf_config(text)
    except ClusterConfigError as error:
        return str(error)
    raise AssertionError(f"taken as valid: {config}")


def markdown() -> str:
    """The table, a row a value; values longer than 90 characters are cut."""
    rows = ["| value | message |", "| --- | --- |"]
    for bad in BAD_TF_CONFIGS:
        text = bad.text if len(bad.text) <= 90 else bad.text[:90] + "..."
        rows.append(f"| {_cell(text)} | {_cell(message_of(bad.text))} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    # Two backquotes, as in Markdown's own rule, so that one inside would not end the code.
    return "`` " + text.replace("\n", "\\n").replace("|", "\\|") + " ``"
