"""The house keeps its plan: who may know whom, where private names may stand, how big a room is."""

from __future__ import annotations

import ast
import enum
import functools
import graphlib
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

WITHOUT_TENSORFLOW = [
    "cli",
    "placement",
    "launcher",
    "cluster",
    "messages",
    "private_names",
    "failures",
    "errors",
    "user_frames",
]
QUARANTINED = {"_keras_private.py", "_tf_private.py"}

# Package -> its floors. Imports point down only, and rooms side by side do not know each other.
FLOORS: dict[str, list[set[str]]] = {
    "tfdist_ext": [
        {"cli"},
        {"testing"},
        {"ray"},
        {"step_costs"},
        {"training"},
        {"strategies"},
        {"flags"},
        {"data"},
        *({room} for room in WITHOUT_TENSORFLOW[1:]),
    ],
    "tfdist_ext.training": [
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
    ],
}
LARGEST_ROOM = 11


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST) -> set[str]:
    """Names of what is imported anywhere in a module: in functions and for type checkers, too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside of the package name it in full"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def imports_by_module() -> dict[str, set[str]]:
    """Module of the package -> the modules of the package that it imports."""
    trees = {module_name(path): ast.parse(text) for path, text in TEXTS.items()}
    # `from package import name` runs the package's __init__ only as a step to `package.name`.
    imports = {}
    for name, tree in trees.items():
        modules = imports_of(tree) & trees.keys()
        packages = {one for one in modules if any(f"{one}." in other for other in modules)}
        imports[name] = modules - packages - {name}
    return imports


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(imports_by_module()).prepare()  # raises CycleError with the cycle


def room_of(module: str, package: str) -> str:
    """The room of a package that a module is in: "steps" of tfdist_ext.training.steps.scope."""
    return module.removeprefix(package).lstrip(".").split(".")[0]


@pytest.mark.parametrize("package", FLOORS)
def test_imports_point_downwards(package: str) -> None:
    floors = FLOORS[package]
    inside = [name for name in imports_by_module() if name.startswith(f"{package}.")]
    assert {room_of(name, package) for name in inside} == set().union(*floors)
    for name in inside:
        room = room_of(name, package)
        (floor,) = (number for number, rooms in enumerate(floors) if room in rooms)
        forbidden = set().union(*floors[: floor + 1]) - {room}
        imported = imports_by_module()[name] & set(inside)
        assert not {room_of(other, package) for other in imported} & forbidden, name


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
    # An import would break all that imports the module; a look-up breaks what needs the name.
    assert not modules_with(r"(?m)^\s*(from|import) (tensorflow\.python|keras\.src)")


def test_all_lists_what_is_there() -> None:
    for name in imports_by_module():
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = importlib.import_module("tfdist_ext").nonsense


def test_no_default_is_a_live_object() -> None:
    """The reference shows defaults. A default of `os.environ` would publish secrets."""
    for name in imports_by_module():
        module = importlib.import_module(name)
        for owner in [module, *filter(inspect.isclass, vars(module).values())]:
            for function in vars(owner).values():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and function.__module__ == name:
                    for parameter in inspect.signature(function).parameters.values():
                        where = f"{function.__qualname__}: {parameter.name}"
                        assert not is_live(parameter.default), where


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


def test_no_variable_argument_or_attribute_is_a_pronoun() -> None:
    pronoun = re.compile("_*(each|found|mine|given|of|on|it|this|them|those|which)_*")
    fields = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr"}
    for path, text in TEXTS.items():
        for node in ast.walk(ast.parse(text)):
            if type(node) in fields and not isinstance(getattr(node, "ctx", None), ast.Load):
                name = getattr(node, fields[type(node)])
                assert not pronoun.fullmatch(name), f"{path}:{node.lineno} assigns {name}"
