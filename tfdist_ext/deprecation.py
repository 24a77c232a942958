"""Old spellings of public names: they work for one release, with a warning of the new name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tfdist_ext.user_frames import warn

__all__ = ["renamed_arguments", "renamed_function", "warn_renamed"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def warn_renamed(old: str, new: str) -> None:
    """One DeprecationWarning, at the user's line."""
    message = f"{old} is deprecated and will be removed in the next release; use {new}"
    warn(message, DeprecationWarning)


def renamed_function(old: str, new: str, function: _Function) -> _Function:
    """`function` under its old name: the same, with a warning."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        warn_renamed(old, new)
        return function(*args, **kwargs)

    called.__name__ = called.__qualname__ = old.rpartition(".")[2]
    called.__doc__ = f"Deprecated. Use `{new}`."
    return called  # type: ignore[return-value]  # it takes what the function takes


def renamed_arguments(renamed: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """A function that also takes keyword arguments by their old names (old name -> new name).

    Raises:
        TypeError: an argument is given by both names.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            for old in renamed.keys() & kwargs.keys():
                new, name = renamed[old], function.__qualname__.removesuffix(".__init__")
                if new in kwargs:
                    raise TypeError(f"{name}() must get {new} alone, got {old} as well: leave it")
                warn_renamed(f"{name}({old}=...)", f"{new}=...")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return called  # type: ignore[return-value]  # it takes what the function takes

    return decorate
