"""The house keeps its plan: who may know whom, where private names may stand, how big a room is."""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import MutableMapping, MutableSequence, MutableSet
from dataclasses import is_dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tfdist_ext"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in MODULES}

# Imports point down this list only.
FLOORS = [
    "cli",
    "testing",
    "ray",
    "step_costs",
    "training",
    "strategies",
    "flags",
    "data",
    "placement",
    "launcher",
    "cluster",
    "messages",
    "private_names",
    "failures",
    "errors",
    "user_frames",
]
WITHOUT_TENSORFLOW = (
    "cli",
    "placement",
    "launcher",
    "cluster",
    "messages",
    "private_names",
    "failures",
    "errors",
    "user_frames",
)
QUARANTINED = {"_keras_private.py", "_tf_private.py"}


# The same inside of training/. Rooms side by side do not know each other.
TRAINING_FLOORS = [
    {"verify"},
    {"model"},
    {"distribution"},
    {"loop"},
    {"checkpoints"},
    {"callbacks"},
    {"building"},
    {"synchronous", "parameter_server"},
    {"steps"},
    {"state"},
    {"variables"},
    {"agreement"},
    {"_keras_private", "_tf_private"},
]
LARGEST_ROOM = 11


def floor_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(TEXTS[path])):
        if isinstance(node, ast.Import):
            rooms |= {floor_of(a.name) for a in node.names if a.name.startswith("tfdist_ext")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdist_ext"):
            if node.module == "tfdist_ext":
                rooms |= {alias.name for alias in node.names if alias.name in FLOORS}
            else:
                rooms.add(floor_of(node.module or ""))
    return rooms - {""}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_downwards() -> None:
    for path in MODULES:
        room = room_of(path)
        if room == "__init__":
            continue  # it names everything, and imports it when it is asked for
        assert room in FLOORS, f"{room} has no place in the list of floors"
        above = FLOORS[: FLOORS.index(room)]
        assert not imported_rooms(path) & set(above), path


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST) -> set[str]:
    """Names of what is imported anywhere in a module: in functions and for type checkers, too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside of the package name it in full"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def import_cycles(imports: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen: set[str] = set()
        left = [module]
        while left:
            for other in imports[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        reached[module] = seen
    return sorted(
        {
            tuple(sorted(other for other in seen if module in reached[other]))
            for module, seen in reached.items()
            if module in seen
        }
    )


@functools.cache
def imports_by_module() -> dict[str, set[str]]:
    """Module of the package -> the modules of the package that it imports."""
    trees = {module_name(path): ast.parse(text) for path, text in TEXTS.items()}
    # `from package import name` runs the package's __init__ only as a step to `package.name`.
    imports = {}
    for name, tree in trees.items():
        found = imports_of(tree) & trees.keys()
        packages = {each for each in found if any(f"{each}." in other for other in found)}
        imports[name] = found - packages - {name}
    return imports


def test_no_module_imports_itself_through_others() -> None:
    assert import_cycles(imports_by_module()) == []


def training_room(name: str) -> str:
    """The room of a module of training/, as "steps" of tfdist_ext.training.steps.scope."""
    return name.removeprefix("tfdist_ext.training").lstrip(".").split(".")[0]


def test_every_room_of_training_has_a_floor() -> None:
    names = [name for name in imports_by_module() if name.startswith("tfdist_ext.training")]
    rooms = {training_room(name) for name in names}
    assert rooms - {""} == set().union(*TRAINING_FLOORS)


def test_imports_of_training_point_downwards() -> None:
    for name, known in imports_by_module().items():
        if name.startswith("tfdist_ext.training."):
            room = training_room(name)
            (floor,) = (n for n, rooms in enumerate(TRAINING_FLOORS) if room in rooms)
            forbidden = set().union(*TRAINING_FLOORS[: floor + 1]) - {room}
            rooms = {training_room(n) for n in known if n.startswith("tfdist_ext.training.")}
            assert not rooms & forbidden, name


def test_a_room_says_what_belongs_there_and_is_not_crowded() -> None:
    for init in (PACKAGE / "training").rglob("__init__.py"):
        assert len(list(init.parent.glob("*.py"))) - 1 <= LARGEST_ROOM, init.parent
        assert ast.get_docstring(ast.parse(TEXTS[init])), init.parent


def test_cluster_and_launcher_start_without_tensorflow() -> None:
    rooms = ", ".join(f"tfdist_ext.{room}" for room in WITHOUT_TENSORFLOW)
    code = f"import sys, tfdist_ext, {rooms}; print({{'tensorflow', 'keras'}} & set(sys.modules))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.strip() == "set()"


def test_the_planner_is_pure() -> None:
    """Only placement/live imports TensorFlow."""
    for path in (PACKAGE / "placement").glob("*.py"):
        names = imports_of(ast.parse(TEXTS[path]))
        live = {name for name in names if name.startswith("tfdist_ext.placement.live")}
        assert not live | ({"tensorflow", "keras"} & {name.split(".")[0] for name in names}), path


def modules_with(pattern: str) -> list[Path]:
    return [path for path, text in TEXTS.items() if re.search(pattern, text)]


def test_private_names_stay_in_quarantine() -> None:
    private = r"keras\.src|tensorflow\.python|tf\.python|__internal__"
    assert {path.name for path in modules_with(private)} <= QUARANTINED


def test_public_names_are_what_all_says() -> None:
    import tfdist_ext as tfd

    for name in tfd.__all__:
        assert getattr(tfd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tfd.nonsense


def test_all_lists_what_is_there() -> None:
    for name in imports_by_module():
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"


def test_no_default_is_a_live_object() -> None:
    """The reference shows defaults. A default of `os.environ` would publish secrets."""
    for name in imports_by_module():
        module = importlib.import_module(name)
        for owner in [module, *filter(inspect.isclass, vars(module).values())]:
            for function in vars(owner).values():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and function.__module__ == name:
                    for each in inspect.signature(function).parameters.values():
                        assert not is_live(each.default), f"{function.__qualname__}: {each.name}"


def is_live(value: object) -> bool:
    """Whether a value may change, or hold what is not in the source."""
    if isinstance(value, MutableMapping | MutableSequence | MutableSet):
        return True
    of_source = inspect.isroutine(value) or inspect.isclass(value) or is_dataclass(value)
    of_source |= isinstance(value, enum.Enum)
    return hasattr(value, "__dict__") and not of_source and repr(value) != "<factory>"


def test_no_message_says_to_install_this_package_by_name() -> None:
    """The package is on no index: whoever registers the name there would be installed."""
    assert modules_with(r"tfdist[_-]ext\[|pip install \W?tfdist") == []


def test_warnings_point_at_the_users_line() -> None:
    assert modules_with(r"warnings\.warn\(") == [], "call tfdist_ext.user_frames.warn"


def test_no_module_is_a_drawer() -> None:
    assert not list(PACKAGE.rglob("utils.py"))
