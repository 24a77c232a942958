"""JSON without its silences: a key given twice and NaN are refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tfdist_ext.messages import refuse, shown

_MAX_DIGITS = 18  # no number here needs more, and Python refuses to read very long ones


def loads(text: str, where: str) -> Any:
    """The value the text describes.

    Raises:
        ClusterConfigError: not JSON (with line and column), a key twice in one object, NaN or
            Infinity, a number of more than 18 digits, nesting too deep.
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
        return json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_constant=constant)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        what = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        advice = "Mind double quotes, commas and closing braces; json.dumps writes it right."
        raise refuse(where, what, near, advice) from None
    except RecursionError:
        what = "is nested too deeply to be read"
        raise refuse(where, what, text[:40], "A cluster needs three levels.") from None
