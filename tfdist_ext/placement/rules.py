"""Placements of variables, rules that give placements to paths, and what rules may name.

In a file a placement is a text, the same that `str(placement)` writes:

    [strategy.placement]
    "embedding/.*" = "sharded(4)"    # four even pieces along axis 0, the planner chooses tasks
    "words/.*" = "sharded"           # a piece on each task or device
    "head/kernel" = "task 0"
    "norm/.*" = "balanced"           # as if there were no rule
    # on the devices of one machine: "mirrored", "owned", "device CPU:0"
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tfdist_ext.errors import PlacementError
from tfdist_ext.messages import check_int, counted, nearest, shown
from tfdist_ext.placement.specs import VariableSpec
from tfdist_ext.user_frames import filter_traceback

_MOST = 1_000_000  # parameter servers
_DEVICE = re.compile(
    r"/?(?:job:localhost/)?(?:replica:0/)?(?:task:0/)?(?:device:)?([a-z_]+):([0-9]+)",
    re.IGNORECASE,
)
_NUMBER = r"([0-9]{1,9})"
_COMPARED = 2000  # paths among which the nearest are looked for: difflib is slow


class Placement:
    """Base class of placements. `str(placement)` is its name in a configuration file."""

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Mirrored(Placement):
    """Each device has a copy of the variable and its slots."""


@dataclass(frozen=True)
class Owned(Placement):
    """Each device has a copy of the variable. One device has the slots and computes updates."""


@dataclass(frozen=True)
class Balanced(Placement):
    """The planner chooses the task. On parameter servers, it can shard the variable."""


@filter_traceback
@dataclass(frozen=True)
class Sharded(Placement):
    """The variable is split along axis 0 into even shards, on different tasks if possible.

    Attributes:
        pieces: the number of shards. With 1, the variable is not split. None means one shard for
            each task or device.
    """

    pieces: int | None = None

    def __post_init__(self) -> None:
        if self.pieces is not None:
            check_int(self.pieces, "pieces of Sharded", 1, error=PlacementError)

    def __str__(self) -> str:
        return "sharded" if self.pieces is None else f"sharded({self.pieces})"

    def pieces_on(self, targets: int, rows: int) -> int:
        """The number of pieces of a variable with `rows` rows on `targets` tasks or devices."""
        return max(min(targets, rows), 1) if self.pieces is None else self.pieces


@filter_traceback
@dataclass(frozen=True)
class OnTask(Placement):
    """One parameter server has the whole variable.

    Attributes:
        task: the index of the server.
    """

    task: int

    def __post_init__(self) -> None:
        check_int(self.task, "task of OnTask", error=PlacementError)

    def __str__(self) -> str:
        return f"task {self.task}"


@filter_traceback
@dataclass(frozen=True)
class OnDevice(Placement):
    """One device has the variable, and all replicas use it.

    Attributes:
        name: the name of the device, such as "GPU:0".
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise PlacementError(
                f'the name of OnDevice must be a device such as "CPU:0", got {shown(self.name)}.'
            )

    def __str__(self) -> str:
        return f"device {self.name}"


@filter_traceback
@dataclass(frozen=True)
class Rule:
    """Places the variables that match a pattern.

    Attributes:
        pattern: the path of one variable, or a regular expression that matches whole paths. A path
            takes precedence over regular expressions.
        placement: a `Placement`, or a string such as "sharded(4)".

    Raises:
        PlacementError: the regular expression or the placement is invalid.
    """

    pattern: str
    placement: Placement

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise PlacementError(f"a rule's pattern must be a string, got {shown(self.pattern)}.")
        object.__setattr__(self, "placement", placement_from(self.placement))
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise PlacementError(
                f"the pattern {self.pattern!r} is not a regular expression: {error}. Escape special"
                " characters of a path."
            ) from None

    def __str__(self) -> str:
        return f"the rule {self.pattern!r} ({self.placement})"


# A list of rules, or a table of pattern -> placement or its text.
Rules: TypeAlias = Iterable[Rule] | Mapping[str, str | Placement]


def placement_from(text: str | Placement) -> Placement:
    """The placement that a text names, as "sharded(4)", "task 0" or "device GPU:0".

    Raises:
        PlacementError: neither such a text nor a placement.
    """
    if isinstance(text, Placement):
        return text
    written = text.strip() if isinstance(text, str) else ""
    for plain in (Mirrored, Owned, Balanced, Sharded):
        if written.lower() == str(plain()):
            return plain()
    if match := re.fullmatch(rf"sharded\s*\(\s*{_NUMBER}\s*\)", written, re.IGNORECASE):
        return Sharded(int(match[1]))
    if match := re.fullmatch(rf"task\s+{_NUMBER}", written, re.IGNORECASE):
        return OnTask(int(match[1]))
    if match := re.fullmatch(r"device\s+(\S+)", written, re.IGNORECASE):
        return OnDevice(match[1])
    raise PlacementError(
        "a placement must be one of mirrored, owned, balanced, sharded, sharded(4), task"
        f" 0, device GPU:0, got {shown(text)}."
    )


def rules_from(rules: Rules) -> tuple[Rule, ...]:
    """The rules of a list of rules, or of a table of pattern -> placement or its text.

    Raises:
        PlacementError: not rules, a text that is not a placement, or two rules with one pattern.
    """
    if isinstance(rules, Mapping):
        rules = [Rule(pattern, placement_from(text)) for pattern, text in rules.items()]
    seen: dict[str, Rule] = {}
    for rule in rules if isinstance(rules, Iterable) else [rules]:
        if not isinstance(rule, Rule):
            raise PlacementError(
                'rules must be a list of Rule("pattern", placement), or a table of pattern ->'
                f' placement, such as {{"embedding/.*": "task 0"}}, got {shown(rules)}.'
            )
        if rule.pattern in seen:
            raise PlacementError(
                f"two rules have the pattern {rule.pattern!r}: {seen[rule.pattern].placement} and"
                f" {rule.placement}. Keep one."
            )
        seen[rule.pattern] = rule
    return tuple(seen.values())


def rules_of(paths: Sequence[str], rules: Rules) -> dict[str, Rule]:
    """Path -> its rule, for the paths that have one.

    Raises:
        PlacementError: rules that `rules_from` refuses, two expressions that match one path, or a
            rule that matches no path.
    """
    known = set(paths)
    all_rules = rules_from(rules)
    exact = {rule.pattern: rule for rule in all_rules if rule.pattern in known}
    matched: dict[str, Rule] = {}
    for rule in all_rules:
        if rule.pattern in exact:
            continue
        matches = re.compile(rule.pattern).fullmatch
        matching = [path for path in paths if matches(path)]
        if not matching:
            raise PlacementError(
                f"{rule} matches no variable. {nearest_paths(rule.pattern, paths)}"
            )
        for path in matching:
            if path not in exact and path in matched:
                raise PlacementError(
                    f"two rules match {path!r}: {matched[path].pattern!r}"
                    f" ({matched[path].placement}) and {rule.pattern!r} ({rule.placement}). Narrow"
                    f" one of them, or add a rule for the path {path!r} itself."
                )
            matched[path] = rule
    return matched | exact


def placement_for(path: str, rules: Sequence[Rule]) -> Placement:
    """The placement of one variable while other variables are unknown; balanced without a rule.

    Raises:
        PlacementError: two expressions match the path.
    """
    matching = [rule for rule in rules if rule.pattern == path or re.fullmatch(rule.pattern, path)]
    rule = rules_of([path], matching).get(path)
    return Balanced() if rule is None else rule.placement


def nearest_paths(pattern: str, paths: Sequence[str]) -> str:
    """Advice on a path or pattern that matches no variable."""
    close = difflib.get_close_matches(pattern[:200], paths[:_COMPARED], n=3, cutoff=0.3)
    close = close or list(paths[:3])
    return f"The nearest: {', '.join(map(repr, close))}." if close else "There are no variables."


@dataclass(frozen=True)
class Targets:
    """The parameter servers or devices that hold variables, by index.

    Attributes:
        count: number of parameter servers or devices.
        devices: names of the devices, in the short form if they have one ("GPU:0"); None for
            parameter servers.
    """

    count: int
    devices: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tasks: int | None, devices: Sequence[str] | None) -> Targets:
        """The targets of the arguments of `plan`.

        Raises:
            PlacementError: both or none of the arguments, no number from 1, or a device twice.
        """
        if (tasks is None) == (devices is None):
            raise PlacementError(
                "a plan needs either a number of parameter servers (tasks) or devices=, got"
                f" tasks={shown(tasks)}, devices={shown(devices)}."
            )
        if devices is None:
            what = "the number of parameter servers"
            return cls(check_int(tasks, what, 1, _MOST, error=PlacementError))
        texts = [name for name in devices if isinstance(name, str)]
        names = tuple(dict.fromkeys(map(short_name, texts)))
        if isinstance(devices, str) or not names or len(names) < len(devices):
            raise PlacementError(
                'devices must be a list of different names such as ["CPU:0", "GPU:0"], got'
                f" {shown(devices)}."
            )
        return cls(len(names), names)

    def index_of(self, spec: VariableSpec, placement: Placement) -> int | None:
        """The index of the target that the placement names; None if the planner chooses.

        Raises:
            PlacementError: there is no such target, the placement is for the other kind of target,
                or the variable has fewer rows than pieces.
        """
        if isinstance(placement, Sharded):
            self._check_pieces(spec, placement)
        if self.devices is None and isinstance(placement, Mirrored | Owned | OnDevice):
            raise PlacementError(
                f"{spec.path!r} cannot be {placement} on parameter servers. Use task N, sharded(N)"
                " or balanced."
            )
        if self.devices is not None and isinstance(placement, OnTask):
            raise PlacementError(
                f"{spec.path!r} cannot be on {placement}, which is for parameter servers. Use"
                f" mirrored, owned, sharded(N), balanced or device {self.devices[0]}."
            )
        if isinstance(placement, OnTask):
            if placement.task >= self.count:
                raise PlacementError(
                    f"{spec.path!r} cannot be on {placement}: the cluster has"
                    f" {counted(self.count, 'ps task')}, numbered from 0."
                )
            return placement.task
        if isinstance(placement, OnDevice) and self.devices is not None:
            name = short_name(placement.name)
            if name not in self.devices:
                raise PlacementError(
                    f"{spec.path!r} cannot be on {placement}, which does not exist."
                    f" {nearest(name, self.devices)}"
                )
            return self.devices.index(name)
        return None

    def check(self, rule: Rule) -> None:
        """Check what a rule names, before the shapes of variables are known.

        Raises:
            PlacementError: as in `index_of`.
        """
        self.index_of(VariableSpec(rule.pattern, (2**40,), "bool"), rule.placement)

    def _check_pieces(self, spec: VariableSpec, placement: Sharded) -> None:
        pieces = placement.pieces_on(self.count, spec.rows)
        if self.devices is not None and pieces > self.count:
            raise PlacementError(
                f"{spec.path!r} cannot be {placement} on {self.count} devices. Write sharded for a"
                " piece on each device."
            )
        if pieces > (spec.rows if spec.shape else 1):
            rows = f"only {spec.rows} rows" if spec.shape else "no axis 0, because it is a scalar"
            raise PlacementError(
                f"{spec.path!r} of shape {spec.shape} cannot be {placement}: it has {rows}."
            )


def short_name(name: str) -> str:
    """ "GPU:0" for the names of a local device, such as "gpu:0"; other names are unchanged."""
    match = _DEVICE.fullmatch(name.strip())
    return f"{match[1].upper()}:{int(match[2])}" if match else name.strip()
