"""Parts of error messages.

Values come from users: they may be huge, deeply nested or not printable. Messages shorten them.
"""

from __future__ import annotations

import difflib
import importlib
import operator
import reprlib
from collections.abc import Iterable
from typing import Any

from tfdist_ext.errors import ClusterConfigError, TfDistError

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_LIMIT = 120  # characters of any value in a message


def shown(value: object) -> str:
    """The value as Python writes it, cut to about 120 characters."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # a foreign __repr__, or an integer too long for str(): show its type
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]}..."


def nearest(word: object, known: Iterable[str]) -> str:
    """Advice on a misspelt word: the nearest known word, or all of them."""
    choices = list(known)
    # The comparison is slow if someone gives a whole file instead of a word.
    start = word[:40].strip().lower() if isinstance(word, str) else ""
    close = difflib.get_close_matches(start, choices, n=1)
    return f'Did you mean "{close[0]}"?' if close else f"Use one of: {', '.join(choices)}."


def check_int(
    value: object, name: str, low: int = 0, high: int | None = None, *, error: type[TfDistError]
) -> int:
    """The value as a Python integer; 3 and numpy's int64(3) are integers, 3.0 and True are not.

    Raises:
        TfDistError: of type `error`: not an integer, or not in [low, high].
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise error(f"{name} must be an integer {limits}, got {shown(value)}.")
    return number


def counted(number: int, noun: str) -> str:
    """ "1 worker", "2 workers"; "ps" is its own plural."""
    return f"{number} {noun}" if number == 1 or noun == "ps" else f"{number} {noun}s"


def optional_module(name: str, package: str, use: str, *, error: type[TfDistError]) -> Any:
    """Import a module of a package that only one feature needs.

    Args:
        name: the name to import.
        package: the name to install.
        use: the feature, as the beginning of a sentence.
        error: the type of the error.

    Raises:
        TfDistError: of type `error`: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        message = f"{use} needs {package}, which is not installed. Install {package}."
        raise error(message) from missing


def refuse(where: str, what: str, received: object, advice: str) -> ClusterConfigError:
    """An error to raise: `where` is the source ("TF_CONFIG"), `what` starts with the key."""
    return ClusterConfigError(f"{where}: {what}, got {shown(received)}. {advice}")
