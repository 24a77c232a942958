"""absl flags for a script's strategy.

tfd.flags.define_strategy_flags()

def main(argv):
    strategy = tfd.create_strategy()  # uses the flags

absl.app.run(main)
"""

from __future__ import annotations

from typing import Any

from absl import flags

from tfdist_ext.user_frames import filter_traceback

__all__ = ["define_strategy_flags", "not_parsed", "strategy_config", "strategy_flags"]

_NAMES = ("strategy", "strategy_config", "devices", "logical_cpus", "communication", "wait")


@filter_traceback
def define_strategy_flags(flag_values: flags.FlagValues | None = None) -> None:
    """Define --strategy, --strategy_config, --devices, --logical_cpus, --communication, --wait.

    Flags take precedence over the settings file, which takes precedence over the environment.

    Args:
        flag_values: where to define the flags; by default `absl.flags.FLAGS`, which
            `create_strategy` reads.
    """
    flag_values = flags.FLAGS if flag_values is None else flag_values
    if _defined(flag_values):
        return  # a library and its script may both define them
    at: dict[str, Any] = {"default": None, "flag_values": flag_values}
    flags.DEFINE_string("strategy", help="Strategy by name, or auto.", **at)
    flags.DEFINE_string("strategy_config", help="TOML file with a [strategy] table.", **at)
    flags.DEFINE_list("devices", help="Devices by name, or one number of devices.", **at)
    flags.DEFINE_integer("logical_cpus", help="Logical CPUs to make.", lower_bound=1, **at)
    exchange = "How workers exchange gradients."
    flags.DEFINE_enum("communication", enum_values=["auto", "ring", "nccl"], help=exchange, **at)
    wait = "Seconds to wait for the other tasks of a cluster (default 300)."
    flags.DEFINE_float("wait", help=wait, **at)


@filter_traceback
def strategy_flags() -> dict[str, Any]:
    """The settings that the command line gives as flags; {} if flags are not defined or parsed."""
    if not _in_use():
        return {}
    given = {name: flags.FLAGS[name].value for name in _NAMES if name != "strategy_config"}
    settings = {name: value for name, value in given.items() if value is not None}
    if "strategy" in settings:
        settings["name"] = settings.pop("strategy")
    devices = settings.get("devices", ())
    if len(devices) == 1 and devices[0].strip().lstrip("-").isdecimal():
        settings["devices"] = int(devices[0])
    return settings


@filter_traceback
def strategy_config() -> str | None:
    """The settings file that the command line gives; None without one."""
    return flags.FLAGS["strategy_config"].value if _in_use() else None


def not_parsed() -> bool:
    """Whether the flags are defined, but have no effect because nothing parsed a command line."""
    return _defined(flags.FLAGS) and not flags.FLAGS.is_parsed()


def _in_use() -> bool:
    return _defined(flags.FLAGS) and flags.FLAGS.is_parsed()


def _defined(flag_values: flags.FlagValues) -> bool:
    return all(name in flag_values for name in _NAMES)
