"""absl flags for a script's strategy.

    tfd.flags.define_strategy_flags()

    def main(argv):
        strategy = tfd.create_strategy()  # uses the flags

    absl.app.run(main)

`create_strategy` reads the flags when it is called.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from tfdist_ext.user_frames import filter_traceback

_NAMES = (
    *("strategy", "strategy_config", "devices", "logical_cpus"),
    *("communication", "bucket_bytes", "shard_optimizer", "gradient_dtype", "wait"),
)
_SETTINGS = {"strategy": "name", "strategy_config": "config"}  # flags with another name


@filter_traceback
def define_strategy_flags(flag_values: flags.FlagValues | None = None) -> None:
    """Defines --strategy, --strategy_config, --devices and flags for other settings.

    Flags take precedence over the settings file, which takes precedence over the environment.

    Args:
        flag_values: the object that gets the flags. The default is `absl.flags.FLAGS`, which
            `create_strategy` reads.
    """
    flag_values = flags.FLAGS if flag_values is None else flag_values
    if "strategy_config" in flag_values:
        return  # a library and its script may both define them
    at: dict[str, Any] = {"default": None, "flag_values": flag_values}
    flags.DEFINE_string("strategy", help="Name of the strategy, or auto.", **at)
    flags.DEFINE_string("strategy_config", help="TOML file with a [strategy] table.", **at)
    flags.DEFINE_list("devices", help="Names of devices, or a number of devices.", **at)
    flags.DEFINE_integer(
        "logical_cpus", help="Number of logical CPUs to create.", lower_bound=1, **at
    )
    exchange = "How workers exchange gradients."
    flags.DEFINE_enum("communication", enum_values=["auto", "ring", "nccl"], help=exchange, **at)
    flags.DEFINE_string("bucket_bytes", help="Size of a gradient bucket, such as 4MiB.", **at)
    flags.DEFINE_bool("shard_optimizer", help="Share the optimizer's slots among workers.", **at)
    flags.DEFINE_enum(
        "gradient_dtype",
        enum_values=["bfloat16", "float16"],
        help="Type in which gradients travel between workers.",
        **at,
    )
    flags.DEFINE_float("wait", help="Seconds to wait for other tasks (default 300).", **at)


@filter_traceback
def strategy_flags() -> dict[str, Any]:
    """Returns the settings from the command-line flags, or {} if the flags are not defined.

    Raises:
        absl.flags.UnparsedFlagAccessError: the flags are not parsed yet. `absl.app.run` parses
            them.
    """
    if "strategy_config" not in flags.FLAGS:
        return {}
    if not flags.FLAGS.is_parsed():
        raise flags.UnparsedFlagAccessError(
            "create_strategy reads the flags of tfd.flags.define_strategy_flags(), which are not"
            " parsed yet. Call it in the function that absl.app.run starts. If this program only"
            " imports the script, call absl.flags.FLAGS.mark_as_parsed() first."
        )
    values = {_SETTINGS.get(name, name): getattr(flags.FLAGS, name) for name in _NAMES}
    settings = {name: value for name, value in values.items() if value is not None}
    devices = settings.get("devices", ())
    if len(devices) == 1 and devices[0].strip().lstrip("-").isdecimal():
        settings["devices"] = int(devices[0])
    return settings
