"""Flags over the file over the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from absl import flags

import tfdist_ext as tfd

pytestmark = pytest.mark.usefixtures("four_cpus")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> flags.FlagValues:
    """Flags of their own, so that no other test sees them."""
    values = flags.FlagValues()
    tfd.flags.define_strategy_flags(values)
    tfd.flags.define_strategy_flags(values)  # a library and its script may both define them
    monkeypatch.setattr(flags, "FLAGS", values)
    return values


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], {}),
        (["--devices=CPU:0"], {"devices": ["CPU:0"]}),
        (
            ["--logical_cpus=3", "--communication=ring"],
            {"logical_cpus": 3, "communication": "ring"},
        ),
        (["--devices=2", "--wait=2.5"], {"devices": 2, "wait": 2.5}),
        (["--bucket_bytes=16MB"], {"bucket_bytes": "16MB"}),
    ],
)
def test_flags_set_the_strategy(
    given: flags.FlagValues, arguments: list[str], settings: dict[str, object]
) -> None:
    given(["program", *arguments])
    assert tfd.flags.strategy_flags() == settings


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--strategy=mirored", r'Did you mean "mirrored".*name = .mirored. from flags'),
        (
            "--communication=ring",
            "no option communication='ring'.*communication = 'ring' from flags",
        ),
    ],
)
def test_errors_name_the_flag(given: flags.FlagValues, argument: str, message: str) -> None:
    given(["program", argument])
    with pytest.raises(tfd.StrategyError, match=message):
        tfd.create_strategy()


def test_flags_take_precedence_over_file_and_environment(
    given: flags.FlagValues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = tfd.ClusterConfig(jobs={"worker": ("a:1", "b:1")}, task=tfd.Task("worker", 1))
    monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config())
    file = tmp_path / "s.toml"
    settings = "alone = true\nwait = 60\nname = 'one_device'\n"
    file.write_text(f"[strategy]\n{settings}devices = ['CPU:1', 'CPU:2', 'CPU:3']\n")
    given(["program", f"--strategy_config={file}", "--strategy=mirrored"])
    strategy = tfd.create_strategy()
    assert strategy.num_replicas_in_sync == 3
    text = str(tfd.explain(strategy))
    assert "it was asked for by name in flags" in text
    assert "name = 'mirrored' from flags" in text
    assert f"devices = ['CPU:1', 'CPU:2', 'CPU:3'] from the file {file}" in text


def test_file_of_the_call_takes_precedence_over_flags(
    given: flags.FlagValues, tmp_path: Path
) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[strategy]\ndevices = 3\n")
    given(["program", "--strategy_config=no/such.toml"])
    assert tfd.create_strategy(config=file).num_replicas_in_sync == 3


@pytest.mark.usefixtures("given")
def test_unparsed_flags_are_an_error() -> None:
    with pytest.raises(flags.UnparsedFlagAccessError, match=r"call .*mark_as_parsed\(\)"):
        tfd.create_strategy("mirrored")
