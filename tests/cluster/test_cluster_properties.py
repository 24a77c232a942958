"""For every valid cluster and for every text at all: the round trip, and nothing but our error."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.cluster import ClusterConfig, Task
from tfdist_ext.errors import ClusterConfigError

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)

_label = st.from_regex(r"[a-z0-9_][a-z0-9_-]{0,8}", fullmatch=True)
_hosts = st.one_of(
    st.lists(_label, min_size=1, max_size=3).map(".".join),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
)
_addresses = st.builds("{}:{}".format, _hosts, st.integers(1, 65535))
_text = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterConfig:
    """Any valid config: every set of jobs, dense or with holes, seen by any of its tasks."""
    names = draw(st.sets(st.sampled_from(["chief", "worker", "ps", "evaluator"]), min_size=1))
    if "ps" in names:
        names.add("worker")
    sizes = {name: 1 if name == "chief" else draw(st.integers(1, 4)) for name in sorted(names)}
    total = sum(sizes.values())
    # Names that look like IPv4 but are none ("1.2.3.999") are refused, so they are left out here.
    pool = draw(
        st.lists(
            _addresses.filter(lambda a: not a.replace(".", "").replace(":", "").isdigit())
            | st.builds("{}:{}".format, st.ip_addresses(v=4), st.integers(1, 65535)),
            min_size=total,
            max_size=total,
            unique_by=str.lower,
        )
    )
    jobs: dict[str, tuple[str, ...]] = {}
    for name, size in sizes.items():
        listed, pool = pool[:size], pool[size:]
        gap = 0 if name == "chief" else draw(st.integers(0, 3))
        at = draw(st.integers(0, size - 1))
        jobs[name] = (*listed[:at], *[""] * gap, *listed[at:])
    task = draw(
        st.sampled_from(
            [Task(n, i) for n, listed in jobs.items() for i, a in enumerate(listed) if a]
        )
    )
    return ClusterConfig(jobs, task, rpc_layer=draw(_text), environment=draw(_text))


def _parses(text: str) -> bool:
    """Whether the text is valid; any error but ours is the failure this looks for."""
    try:
        config = ClusterConfig.from_tf_config(text)
    except ClusterConfigError as error:
        message = str(error)
        assert message.startswith("TF_CONFIG: ")
        assert ", got " in message
        assert len(message) < 400
        message.encode("utf-8")
        return False
    assert ClusterConfig.from_tf_config(config.to_tf_config()) == config
    return True


@QUICK
@given(clusters())
def test_round_trip(config: ClusterConfig) -> None:
    text = config.to_tf_config()
    text.encode("ascii")  # fit for an environment variable in any locale
    again = ClusterConfig.from_tf_config(text)
    assert again == config
    assert again.jobs == config.jobs
    assert again.task == config.task
    assert ClusterConfig.from_env({"TF_CONFIG": text}) == config


@QUICK
@given(clusters())
def test_every_task_sees_the_same_cluster_and_one_is_chief(config: ClusterConfig) -> None:
    views = [config.for_task(task.type, task.index) for task in config.tasks()]
    assert len(views) == config.num_tasks == len({view.address for view in views})
    assert {view.task for view in views} == set(config.tasks())
    chiefs = [view for view in views if view.is_chief]
    has_one = "chief" in config.jobs or bool(config.jobs.get("worker", ("",))[0])
    assert len(chiefs) == (1 if has_one else 0)


# Lone surrogates included: os.environ has them where a variable is not UTF-8.
_any_text = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=60)
_words = st.sampled_from(
    [
        "cluster",
        "task",
        "worker",
        "chief",
        "ps",
        "master",
        "type",
        "index",
        "0",
        "a:1",
        "",
        "[::1]:1",
    ]
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _words | _any_text,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_words | _any_text, inner, max_size=4)
    ),
    max_leaves=12,
)


@QUICK
@given(_json)
def test_any_json_parses_or_is_refused(value: Any) -> None:
    _parses(json.dumps(value))
    _parses(json.dumps({"cluster": value, "task": {"type": "worker", "index": 0}}))
    _parses(json.dumps({"cluster": {"worker": value}, "task": {"type": "worker", "index": 0}}))
    _parses(json.dumps({"cluster": {"worker": ["a:1", value]}, "task": value}))
    assert not _parses(json.dumps({"cluster": {"worker": ["a:1"]}, "task": value, "nonsense": 1}))
