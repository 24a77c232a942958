"""Errors of remote calls, without what the way back to the coordinator has added to them."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

__all__ = ["remote_errors_in_short", "root_message"]

# The message of an operation stands before its name. Operations that were given up do not count.
_FAILED = re.compile(r"^(?!.*\bCANCELLED\b)(.*\S)\s*\n\s*\[\[.*?\{\{node ([^}]*)\}\}", re.MULTILINE)
_BEFORE = re.compile(r"^\s*(\(\d+\)\s*)?([A-Z_]+:)?\s*(\{\{function_node [^}]*\}\})?\s*")
# What a table gives to a branch, which does not pass on what is known only when it is called.
_TABLE_IN_BRANCH = re.compile(r"feed a value for placeholder tensor .* dtype resource")
# Of the traceback of the operation, where it was made.
_OF_USER = re.compile(
    r"^ *File \"((?!.*/site-packages/|.*/tfdist_ext/|<)[^\"]*\", line \d+)", re.MULTILINE
)
# What TensorFlow's coordinator logs of an error that it raises as well.
_LOGGED_TWICE = re.compile(
    r" /job:worker/task:%d encountered the following error|Start cancelling closures due to error"
)


def root_message(text: str) -> str:
    """The message of the operation that failed first, and the operation's name.

    TensorFlow's own repeats it once for each task that passed it on.
    """
    found = _FAILED.search(text)
    if found is None:
        return text.split("\nAdditional GRPC error information", 1)[0].strip()
    message = f"{_BEFORE.sub('', found[1])} [operation: {found[2]}]"
    if _TABLE_IN_BRANCH.search(message):
        message = (
            "a lookup table made in the strategy's scope cannot be used inside of tf.cond,"
            " tf.switch_case or an `if` on a tensor: each worker's own table is chosen when the"
            f" function is called, and TensorFlow does not pass it on. Look up before it. {message}"
        )
    traceback = text.split("Detected at node", 2)[1:2]
    lines = _OF_USER.findall(traceback[0]) if traceback else []
    return f'{message}, made at "{lines[-1]}' if lines else message


@contextlib.contextmanager
def remote_errors_in_short() -> Iterator[None]:
    """Scope in which an error of TensorFlow's says what failed, in one line and only once."""
    logger = tf.get_logger()
    logger.addFilter(_not_logged_twice)
    try:
        yield
    except Exception as error:
        # TensorFlow wraps an error that was met while a worker made its data set.
        original: Any = getattr(error, "original_exception", error)
        if not isinstance(original, tf.errors.OpError):
            raise
        raise type(original)(
            original.node_def, original.op, root_message(original.message)
        ) from None
    finally:
        logger.removeFilter(_not_logged_twice)


def _not_logged_twice(record: logging.LogRecord) -> bool:
    return not _LOGGED_TWICE.match(str(record.msg))
