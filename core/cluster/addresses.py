"""Network addresses of a run: processes listen only on the address that Ray assigned to the machine.

On a single machine that is the loopback address. Between machines, gloo, NCCL and torch's RPC would otherwise use the
interface of the host name, which on Debian is also loopback.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: the documented name

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}
"""Variables with the form of their value. NCCL takes a name without = for a prefix: eth1 would be eth10, too."""


def is_loopback(address: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.7"), is_loopback("::1")
    (True, False, True)
    """
    return ipaddress.ip_address(address).is_loopback


def find_interface(address: str, interfaces: Mapping[str, Iterable[str]]) -> str | None:
    """Return the network interface with `address`; None if no interface has it, as behind address translation.

    interfaces: addresses of each interface of this machine.

    >>> find_interface("10.0.0.7", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]})
    'eth0'
    """
    wanted = ipaddress.ip_address(address)
    for name, held in interfaces.items():
        # A link-local IPv6 address ends in % and its interface, which ip_address would count as a part of it.
        for one in (ipaddress.ip_address(text.partition("%")[0]) for text in held):
            # 127.0.1.1, Debian's address of the host name, is usually not listed, but belongs to the loopback
            # interface.
            if one == wanted or (one.is_loopback and wanted.is_loopback and one.version == wanted.version):
                return name
    return None


def list_interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface of this machine."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def use_interface_of(address: str) -> None:
    """Make process groups of this process use the interface of `address`. Call before creating one.

    On loopback nothing else works. Between machines, variables set by the user are kept.
    """
    if (name := find_interface(address, list_interfaces())) is None:
        return
    for variable, form in INTERFACE_VARIABLES.items():
        if is_loopback(address) or variable not in os.environ:
            os.environ[variable] = form.format(name)
    if is_loopback(address) or "VLLM_HOST_IP" not in os.environ:
        os.environ["VLLM_HOST_IP"] = address


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at `address` only, or at all addresses if the machine does not have `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # Behind address translation no interface has the address by which others reach this machine.
        return socket.create_server(("", port), family=family)


def host_store(address: str, port: int = 0, *, timeout: timedelta, size: int | None = None) -> TCPStore:
    """Create a process group's store that listens at `address` only. torch's own store listens on all addresses."""
    listener = listen_at(address, port)
    store = TCPStore(
        address,
        listener.getsockname()[1],
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # it is the store's now
    return store
