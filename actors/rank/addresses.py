"""The address at which the other ranks reach this one, and the interface that has it.

It is that of the node, as Ray knows it, unless the node's own environment names an interface. A name is looked up here, on the
node it belongs to, which is where it may stand for the loopback address.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Of a node's own environment: the interface its ranks talk over; of several, by commas, the first that is there."""

_SIOCGIFADDR = 0x8915
_IFREQ = "256s"


class AddressError(OSError):
    """A node has no such interface, or its name no address."""


def own_address(node: str, environment: Mapping[str, str]) -> str:
    """Where ranks on this machine listen: `node` (an address or a name), or the interface that `environment` asks for.

    Raises `AddressError`.
    """
    wanted = [name for name in environment.get(INTERFACE_VARIABLE, "").split(",") if name]
    if not wanted:
        return _resolved(node)
    found = interfaces()
    for name in wanted:
        if name in found:
            return found[name]
    seen = ", ".join(f"{name} ({address})" for name, address in found.items())
    raise AddressError(
        f"{INTERFACE_VARIABLE}={environment[INTERFACE_VARIABLE]} names no interface of {socket.gethostname()} that has an IPv4 "
        f"address; it has {seen or 'none'}"
    )


def interface_of(address: str) -> str:
    """The interface with an address; empty where none has it or the system does not say."""
    return next((name for name, found in interfaces().items() if found == address), "")


def interfaces() -> dict[str, str]:
    """IPv4 addresses of this machine's interfaces, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack(_IFREQ, name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _resolved(node: str) -> str:
    try:
        found = socket.getaddrinfo(node, None)
    except OSError as error:
        raise AddressError(f"{socket.gethostname()} does not know the address of its node, {node}: {error}") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
