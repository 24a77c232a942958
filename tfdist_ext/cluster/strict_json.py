"""JSON without its silences: a key given twice, NaN and half characters are refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tfdist_ext.messages import refuse, shown

_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_DIGITS = 18  # no number here needs more, and Python refuses to read very long ones


def loads(text: str, where: str) -> Any:
    """The value the text describes.

    Raises:
        ClusterConfigError: not JSON (with line and column), a key twice in one object, NaN or
            Infinity, a number of more than 18 digits, nesting too deep, a lone surrogate.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            what = f"the key {shown(twice)} stands twice in one object"
            raise refuse(where, what, pairs, "Keep one.")
        return found

    def whole(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            what = f"has a number of {len(digits)} digits"
            raise refuse(where, what, digits, "Indices and ports are small numbers.")
        return int(digits)

    def constant(name: str) -> None:
        raise refuse(where, f"{name} is not JSON", name, "Write a number, a text or null.")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_constant=constant)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        what = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        advice = "Mind double quotes, commas and closing braces; json.dumps writes it right."
        raise refuse(where, what, near, advice) from None
    except RecursionError:
        what = "is nested too deeply to be read"
        raise refuse(where, what, text[:40], "A cluster needs three levels.") from None
    _refuse_surrogates(value, where)
    return value


def _refuse_surrogates(value: Any, where: str) -> None:
    """Half a UTF-16 pair is in no host name and cannot be printed or sent: refuse it by path."""
    # A stack, not recursion: what json could read may still be too deep for Python to walk.
    stack: list[tuple[Any, Any]] = [(value, None)]
    while stack:
        item, path = stack.pop()
        if isinstance(item, dict):
            for key, inner in item.items():
                stack += [(key, (path, key)), (inner, (path, key))]
        elif isinstance(item, list):
            stack += [(inner, (path, index)) for index, inner in enumerate(item)]
        elif isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
            what = f"{_written(path)} has a lone surrogate, half of a character"
            raise refuse(where, what, item, "Write the character itself, in UTF-8.")


def _written(path: Any) -> str:
    steps: list[str] = []
    while path is not None and len(steps) < 4:
        path, step = path
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:40]}")
    text = "".join(reversed(steps)).lstrip(".") or "the value"
    return text.encode("ascii", "backslashreplace").decode()
