"""Errors of remote calls, in one line."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist_ext.training.parameter_server.calls import remote_errors_in_short, root_message

GRPC = (
    "\nAdditional GRPC error information from remote target /job:worker/replica:0/task:0 while"
    ' calling /tensorflow.eager.EagerService/Enqueue:\n:UNKNOWN:Error received from peer  {"x\\n'
    '\\t [[{{node a/b}}]]"}'
)
TRACEBACK = """Graph execution error:

Detected at node model/take/Gather defined at (most recent call last):
  File "/home/u/train.py", line 7, in <module>

  File "/usr/lib/python3/site-packages/keras/src/layer.py", line 9, in call

  File "/home/u/layers.py", line 30, in call

  File "/usr/lib/python3/site-packages/keras/src/ops.py", line 9, in take

"""


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            f"Incompatible shapes: [8,1] vs. [12,1]\n\t [[{{{{node loss/sub}}}}]]{GRPC}",
            "Incompatible shapes: [8,1] vs. [12,1] [operation: loss/sub]",
        ),
        (
            "2 root error(s) found.\n  (0) CANCELLED:  RecvFromRemoteAsync is cancelled.\n"
            "\t [[{{node Shape/_4}}]]\n  (1) INVALID_ARGUMENT:   indices[0,0] = 99 is not in [0, 3)"
            f"\n\t [[{{{{node e/Gather}}}}]]{GRPC}",
            "indices[0,0] = 99 is not in [0, 3) [operation: e/Gather]",
        ),
        (
            f"{TRACEBACK}indices[0] = 5 is not in [0, 5)\n\t [[{{{{node model/take/Gather}}}}]]",
            "indices[0] = 5 is not in [0, 5) [operation: model/take/Gather],"
            ' made at "/home/u/layers.py", line 30',
        ),
        (
            "{{function_node __inference_f_2}} assertion failed: [3]\n\t [[{{node Assert}}]]",
            "assertion failed: [3] [operation: Assert]",
        ),
    ],
)
def test_the_first_operation_that_failed_is_named(text: str, short: str) -> None:
    assert root_message(text) == short


def test_the_type_stays() -> None:
    text = f"nan\n\t [[{{{{node check}}}}]]{GRPC}"
    with pytest.raises(tf.errors.InvalidArgumentError) as caught, remote_errors_in_short():
        raise tf.errors.InvalidArgumentError(None, None, text)
    assert str(caught.value) == "nan [operation: check]"
    assert caught.value.__suppress_context__
