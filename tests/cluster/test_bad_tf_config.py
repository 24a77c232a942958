"""Every bad TF_CONFIG is refused in words that help; the page that shows them is up to date."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bad_tf_configs import BAD_TF_CONFIGS, Bad, markdown

from tfdist_ext.cluster import ClusterConfig
from tfdist_ext.errors import ClusterConfigError, TfDistError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "figures" / "tf_config_errors"
PAGE = ROOT / "docs" / "cluster.md"
BEGIN = "<!-- begin: printed by scripts/figures/tf_config_errors -->\n"
END = "<!-- end -->\n"


def test_the_table_is_as_long_as_promised() -> None:
    assert len(BAD_TF_CONFIGS) >= 40
    assert len({bad.reason for bad in BAD_TF_CONFIGS}) == len(BAD_TF_CONFIGS)
    assert len({bad.text for bad in BAD_TF_CONFIGS}) == len(BAD_TF_CONFIGS)


@pytest.mark.parametrize("bad", BAD_TF_CONFIGS, ids=lambda bad: bad.reason.replace(" ", "-"))
def test_bad_value(bad: Bad) -> None:
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


def test_the_page_shows_what_the_script_prints() -> None:
    printed = subprocess.run(
        [SCRIPT], capture_output=True, text=True, encoding="utf-8", check=True, timeout=60
    ).stdout
    assert printed == markdown()
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(BEGIN)[2].partition(END)[0]
    assert section.strip() == printed.strip(), "run scripts/figures/tf_config_errors --update"
