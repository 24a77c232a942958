"""Private names of TensorFlow and Keras, looked up when they are used.

A module `_tf_private.py` or `_keras_private.py` has one table of the private names that it uses.
Nothing imports them: if a release has moved a name, only the feature that needs it fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tfdist_ext.errors import TfDistError

# The oldest and the newest release that pyproject.toml allows. The tests have passed with both.
TESTED = {"tensorflow": ("TensorFlow", "2.20", "2.21"), "keras": ("Keras", "3.12", "3.15")}


@dataclass(frozen=True)
class PrivateNames:
    """The private names of one package that a module uses.

    Attributes:
        package: the package that has the names.
        error: the error to raise if a name is gone.
        uses: path below the package, as "distribute.values.Mirrored" -> the feature that needs it.
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
            return getattr(import_module(f"{self.package}.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise self._gone(f"{self.package}.{path}", self.uses[path]) from error

    def of(self, holder: Any, name: str, use: str) -> Any:
        """A private attribute of an object, which the feature `use` needs.

        Raises:
            TfDistError: of type `error`: the object has no such attribute.
        """
        try:
            return getattr(holder, name)
        except AttributeError as error:
            raise self._gone(f"{type(holder).__qualname__}.{name}", use) from error

    def _gone(self, name: str, use: str) -> TfDistError:
        package = self.package.partition(".")[0]
        title, oldest, newest = TESTED[package]
        version = import_module(package).__version__
        return self.error(
            f"{title} {version} does not have the private name {name}, which is needed for {use}."
            f" Install a release from {oldest} to {newest}: tfdist_ext was tested with these."
        )
