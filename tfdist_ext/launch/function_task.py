"""The process of a task that runs a function of another process; see `functions.launch`.

It is started by its path, and can import what the other process can once it has read the call.
"""

from __future__ import annotations

import linecache
import pickle
import sys
import traceback
from pathlib import Path

RESULT, TRACEBACK = ".result", ".traceback"  # behind the name of a task: files of its answer


def main(call_file: str, answer: str) -> None:
    """Run the function, and write its result, or the traceback of its exception.

    Args:
        call_file: the call that `launch` has written.
        answer: where to write, without the suffix.
    """
    call = pickle.loads(Path(call_file).read_bytes())
    sys.path[:] = call["path"]
    del sys.argv[1:]
    linecache.cache.update(call["sources"])
    try:
        function, args = pickle.loads(call["call"])
        result = _pickled(function(*args))
    except Exception as error:
        # As Python ends a program, but without the frame of this module, and with the lines of
        # cells. Exit functions read `last_value`.
        trace = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(trace)))
        Path(answer + TRACEBACK).write_text(text, encoding="utf-8")
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        print(text, end="", file=sys.stderr)
        sys.exit(1)
    Path(answer + RESULT).write_bytes(result)


def _pickled(result: object) -> bytes:
    import cloudpickle  # what is defined in the function has no name to be found by

    try:
        return cloudpickle.dumps(result)
    except Exception as error:  # of whatever object
        from tfdist_ext.errors import LaunchError

        raise LaunchError(
            f"what fn returns must be copied to the process that has launched it, got a"
            f" {type(result).__name__}: {error}; return numbers or NumPy arrays"
        ) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
