"""Where a tf.data service is, and whether somebody answers there: before TensorFlow asks.

TensorFlow tries a dispatcher that is not there again and again, and says so in its log alone.
"""

from __future__ import annotations

import socket
import time

from tfdist_ext.cluster.addresses import AddressError, identity
from tfdist_ext.errors import DataError
from tfdist_ext.messages import shown

__all__ = ["dispatcher_address", "wait_for_dispatcher"]

_SCHEME = "grpc://"
_PAUSE = 0.2  # seconds between two attempts
_ATTEMPT = 2.0  # seconds for one: a host that is switched off does not answer at all


def dispatcher_address(service: object, source: str = "service") -> str:
    """The "host:port" in "grpc://host:port".

    Args:
        service: what was given.
        source: where it was given, for the message.

    Raises:
        DataError: another or no scheme, no host, no port.
    """
    advice = f'Write "{_SCHEME}host:port", for example "{_SCHEME}10.0.0.5:5000".'
    if not isinstance(service, str) or not service.startswith(_SCHEME):
        raise DataError(
            f"{source} must be the address of a tf.data service dispatcher, with its scheme, got"
            f" {shown(service)}. {advice}"
        )
    address = service.removeprefix(_SCHEME)
    try:
        identity(address)
    except AddressError as error:
        raise DataError(
            f"{source} must be a possible address, got {shown(service)}, which {error.what}."
            f" {advice}"
        ) from None
    return address


def wait_for_dispatcher(address: str, seconds: float) -> None:
    """Return once something listens at "host:port".

    Raises:
        DataError: nothing does after this time.
    """
    host, _, port = address.rpartition(":")
    at = host.strip("[]"), int(port)
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection(at, timeout=min(max(left, 0.1), _ATTEMPT)).close()
            return
        except OSError as error:
            if left <= _PAUSE:
                raise DataError(
                    f"no tf.data service dispatcher answered at host {host}, port {port} within"
                    f" {seconds:g} s ({error}). Is it started, is the address right, can this"
                    " machine reach it?"
                ) from None
        time.sleep(_PAUSE)
