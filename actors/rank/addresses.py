"""Determines the address at which other ranks reach this one, and the network interface that has it.

The address is the node's, as Ray knows it, unless the node's own environment names an interface. Host names are resolved here,
on the node that they belong to, because a node's own name may resolve to the loopback address there.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable of a node that names the interface for its ranks; in a comma-separated list, the first that exists."""

_SIOCGIFADDR = 0x8915
_IFREQ = "256s"


class AddressError(OSError):
    """Raised if a node does not have the requested interface, or if its name has no address."""


def own_address(node: str, environment: Mapping[str, str]) -> str:
    """Return the IP address on which ranks of this machine listen.

    This is the address of `node` (an address or a name, as Ray knows it), unless the variable ``GLOO_SOCKET_IFNAME`` of
    `environment` (normally `os.environ`) names interfaces: then that of the first that exists. Raises `AddressError` if there
    is no such interface or address.
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
    """Return the name of this machine's interface with the IPv4 address `address`; empty if none has it or the system does not
    report it."""
    return next((name for name, found in interfaces().items() if found == address), "")


def interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this machine's interfaces, by interface name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack(_IFREQ, name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _resolved(node: str) -> str:
    try:
        found = socket.getaddrinfo(node, None)
    except OSError as error:
        raise AddressError(f"{socket.gethostname()} does not know the address of its node, {node}: {error}") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
