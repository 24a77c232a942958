"""Every bad TF_CONFIG is refused in words that help; the page that shows them is up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bad_tf_configs import BAD_TF_CONFIGS, Bad, markdown
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import ClusterConfigError, TfDistError

PAGE = Path(__file__).parents[2] / "docs" / "environment_variables.md"
BEGIN = "<!-- begin: printed by scripts/figures/tf_config_errors -->\n"
END = "<!-- end -->\n"


@pytest.mark.parametrize("bad", BAD_TF_CONFIGS, ids=lambda bad: bad.reason.replace(" ", "-"))
def test_invalid_tf_config_is_refused_with_advice(bad: Bad) -> None:
    for read in (
        lambda: ClusterConfig.from_tf_config(bad.text),
        lambda: ClusterConfig.from_env({"TF_CONFIG": bad.text}),
    ):
        with pytest.raises(ClusterConfigError) as caught:
            read()
        assert isinstance(caught.value, TfDistError)
        assert isinstance(caught.value, ValueError)
        message = str(caught.value)
        assert message.startswith("TF_CONFIG: ")
        assert bad.fragment in message
        # What was wrong, what arrived, what to do: in this order, none of them empty.
        wrong, _, rest = message.partition(", got ")
        received, _, advice = rest.partition(". ")
        assert bad.arrived in received
        assert wrong
        assert received
        assert advice.endswith((".", "?"))
        assert len(message) < 400
        message.encode("utf-8")  # can be printed and logged


def test_page_shows_the_messages() -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(BEGIN)[2].partition(END)[0]
    assert section.strip() == markdown().strip(), "run scripts/figures/tf_config_errors --update"


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
    ["cluster", "task", "worker", "chief", "ps", "type", "index", "0", "a:1", "", "[::1]:1"]
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
