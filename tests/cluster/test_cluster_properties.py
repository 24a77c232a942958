"""Any text as TF_CONFIG is a valid cluster, or an error that names what is wrong."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import ClusterConfigError

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)


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
