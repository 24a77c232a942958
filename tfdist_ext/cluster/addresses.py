"""One address: "host:port", with an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress
import re

# The common case in one match. Ports have no leading zeros, so one address has one spelling.
_PLAIN = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*):([1-9][0-9]{0,4})")
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_DOTTED = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_EXAMPLE = 'Write "host:port", for example "10.0.0.5:2222".'
_MAX_PORT = 65535


class AddressError(ValueError):
    """An address that cannot be dialed.

    Attributes:
        what: what is wrong with it; completes a sentence that begins with its name.
        advice: what to write instead.
    """

    def __init__(self, what: str, advice: str = _EXAMPLE) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice


def identity(address: object) -> tuple[str, int]:
    """The host in one canonical spelling, and the port: equal for two spellings of one address.

    Raises:
        AddressError: not text, blank, no host, no port, a port that is not 1 to 65535, a scheme,
            white space, an IPv6 host that is wrong or without brackets.
    """
    if not isinstance(address, str):
        raise AddressError("is not text")
    match = _PLAIN.fullmatch(address)
    if match is None or int(match[2]) > _MAX_PORT:
        return _identity_of_unusual(address)
    host = match[1].lower().rstrip(".")
    if _DOTTED.fullmatch(host):
        _ip(ipaddress.IPv4Address, host)
    return host, int(match[2])


def _identity_of_unusual(address: str) -> tuple[str, int]:
    if not address.strip():
        raise AddressError("is blank")
    if any(character.isspace() for character in address):
        raise AddressError("has white space in it", "Take the white space out.")
    if "://" in address:
        raise AddressError("has a scheme", 'Take out what stands before the host, "://" included.')
    if address.startswith("["):
        match = _BRACKETED.fullmatch(address)
        if match is None:
            raise AddressError(
                "has brackets that do not match", 'Write IPv6 as "[2001:db8::1]:2222".'
            )
        host = _ip(ipaddress.IPv6Address, match[1])
        return f"[{host}]", _port(match[2])
    if address.count(":") > 1:
        raise AddressError(
            "has more than one colon", 'Put an IPv6 host in brackets: "[2001:db8::1]:2222".'
        )
    host, colon, port = address.partition(":")
    if not colon:
        raise AddressError("has no port")
    if not host:
        raise AddressError("has no host")
    _port(port)
    raise AddressError(
        "has a host name with characters that no host name has",
        "Use letters, digits, dots and hyphens.",
    )


def _ip(kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address], host: str) -> str:
    try:
        return str(kind(host))
    except ValueError:
        version = "IPv6" if kind is ipaddress.IPv6Address else "IPv4"
        raise AddressError(f"is not a possible {version} address") from None


def _port(text: str | None) -> int:
    if not text:
        raise AddressError("has no port")
    if not text.isascii() or not text.isdigit():
        raise AddressError("has a port that is not a number")
    if not _PORT.fullmatch(text) or int(text) > _MAX_PORT:
        raise AddressError("has a port out of range", "Use a port from 1 to 65535.")
    return int(text)
