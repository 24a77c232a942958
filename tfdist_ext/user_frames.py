"""Tracebacks and warnings that end at the user's line, as in Keras.

`keras.config.disable_traceback_filtering()` shows all frames.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

_Public = TypeVar("_Public", bound=Callable[..., Any])

_HIDDEN = frozenset({"tfdist_ext", "keras", "tensorflow"})
# Users call these packages, too. Their frames are hidden only if hidden code has called them.
_LIBRARIES = sys.stdlib_module_names | {"numpy", "h5py"}
_SPECIAL_METHODS = {"__init__", "__call__", "__getattr__", "__setattr__", "__reduce__"}


def filter_traceback(public: _Public) -> _Public:
    """Decorate a public function or class, so that its errors show only the user's frames."""
    if not inspect.isclass(public):
        return _filtered(public)
    for name, member in list(vars(public).items()):
        if name.startswith("_") and name not in _SPECIAL_METHODS:
            continue
        if inspect.isfunction(member):
            setattr(public, name, _filtered(member))
        elif isinstance(member, classmethod | staticmethod):
            setattr(public, name, type(member)(_filtered(member.__func__)))
    return public


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that called this package."""
    caller = frame = sys._getframe(1)
    while _package_of(frame) in _HIDDEN | _LIBRARIES:
        if frame.f_back is None:  # a thread of ours
            frame = caller
            break
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals["__name__"]
    filename = frame.f_code.co_filename
    warnings.warn_explicit(message, category, filename, frame.f_lineno, module, registry)


def _filtered(function: _Public) -> _Public:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            keras = sys.modules.get("keras")
            is_on = keras is None or keras.config.is_traceback_filtering_enabled()
            if is_on and not _is_in_autograph(sys._getframe(1)):
                _filter_chain(error)
            raise  # without a value, so that Python does not add the frame of `called`

    return called  # type: ignore[return-value]  # it takes what the function takes


def _is_in_autograph(frame: FrameType | None) -> bool:
    """Whether AutoGraph has called; it makes the error anew from all frames."""
    while frame is not None and "__autograph_generated" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _filter_chain(error: BaseException) -> None:
    """Filter the traceback of an exception, of its cause and of its context."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        current = left.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = _frames_of_user(current.__traceback__)
            left += [current.__cause__, current.__context__]


def _frames_of_user(trace: TracebackType | None) -> TracebackType | None:
    shown, hidden = [], False
    while trace is not None:
        package = _package_of(trace.tb_frame)
        hidden = package in _HIDDEN or (hidden and package in _LIBRARIES)
        if not hidden:
            shown.append(trace)
        trace = trace.tb_next
    for entry in reversed(shown):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
