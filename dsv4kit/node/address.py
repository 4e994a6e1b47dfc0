"""The address a node is reached at by the others."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


class AddressError(Exception):
    """No address the other nodes could use; the text says which was looked for and what to set."""


def own_address(interface: str | None) -> str:
    """IPv4 address of the interface, or of the host name where none is configured.

    Debian and Ubuntu give a host name the address 127.0.1.1, which is of no use to the other nodes: refused.
    """
    if interface:
        return interface_address(interface)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise AddressError(
            f"the host name {name!r} has no address ({error}); set network.interface of the site"
        ) from None
    if address.startswith("127."):
        raise AddressError(f"the host name {name!r} resolves to {address}; set network.interface of the site")
    return address


def interface_address(interface: str) -> str:
    """IPv4 address of a network interface."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise AddressError(
                f"network interface {interface!r} has no IPv4 address here; interfaces: {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
