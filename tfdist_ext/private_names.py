"""Private names of TensorFlow and Keras: looked up where they are used, and missed in a sentence.

A module in quarantine (`_tf_private.py`, `_keras_private.py`) has one table of the names that it
uses, and nothing imports them: a name that a release has moved breaks what needs it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tfdist_ext.errors import TfDistError

__all__ = ["TESTED", "PrivateNames", "untested_versions"]

# The releases with which the suite has passed: the oldest that setup.py allows, and the newest.
TESTED = {"tensorflow": ("TensorFlow", "2.20", "2.21"), "keras": ("Keras", "3.12", "3.15")}


@dataclass(frozen=True)
class PrivateNames:
    """The private names of one package that a module uses.

    Attributes:
        package: the module that they are below, `python` of TensorFlow or `src` of Keras.
        error: what is raised where one is gone.
        uses: path below the package, as "distribute.values.Mirrored" -> what needs it.
    """

    package: str
    error: type[TfDistError]
    uses: Mapping[str, str]

    def __call__(self, path: str) -> Any:
        """The object that a path of the table names.

        Raises:
            TfDistError: of type `error`: the installed release has no such name.
        """
        module, _, name = path.rpartition(".")
        try:
            return getattr(self._module(module), name)
        except (ImportError, AttributeError) as error:
            raise self._gone(f"{self.package}.{path}", self.uses[path]) from error

    def of(self, holder: Any, name: str, use: str) -> Any:
        """A private attribute of an object.

        Args:
            use: what needs it.

        Raises:
            TfDistError: of type `error`: the object has none.
        """
        try:
            return getattr(holder, name)
        except AttributeError as error:
            raise self._gone(f"{type(holder).__qualname__}.{name}", use) from error

    def _module(self, path: str) -> Any:
        return import_module(f"{self.package}.{path}")

    def _gone(self, name: str, use: str) -> TfDistError:
        package = self.package.partition(".")[0]
        title, oldest, newest = TESTED[package]
        version = import_module(package).__version__
        return self.error(
            f"{title} must have the private name {name} for {use}, got {title} {version}, which has"
            f" it no more; install a release from {oldest} to {newest}, with which tfdist_ext was"
            " tested."
        )


def untested_versions() -> str:
    """A sentence about installed releases that are not among those of TESTED; "" where all are."""
    found = []
    for package, (title, oldest, newest) in TESTED.items():
        version = import_module(package).__version__
        if not _minor(oldest) <= _minor(version) <= _minor(newest):
            found.append(f"{title} from {oldest} to {newest}, got {version}")
    if not found:
        return ""
    return (
        f"tfdist_ext was tested with {'; with '.join(found)}. Steps are checked all the same, and"
        " an error says where a release takes another way. docs/compatibility.md lists what was"
        " tested."
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
