"""Check `ray_address` in advance: Ray itself retries for most of a minute and ends in a traceback."""

from __future__ import annotations

import os
import socket

from core.errors import UserError
from core.timing.deadlines import ADDRESS_CHECK_TIMEOUT_S

FIX = "give the host:port of a cluster that runs (usually port 6379), or leave the key unset"
CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 (and so gRPC) client: the preface and an empty SETTINGS frame."""
FRAME_HEADER, SETTINGS = 9, 4
"""Header length of a frame in bytes, and type of the first frame from a server."""


def parse_address(address: str) -> tuple[str, int]:
    """Parse host:port. Raises UserError for anything else.

    >>> parse_address("[::1]:6379")
    ('::1', 6379)
    """
    if address.startswith("ray://"):
        raise UserError(f"ray_address={address!r:.200} is an address of Ray Client, which is not supported: {FIX}")
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not host.isprintable() or " " in host or not (port.isascii() and port.isdigit()):
        raise UserError(f"ray_address={address!r:.200} is not of the form host:port: {FIX}")
    # Cut, because int() raises for a text of thousands of digits.
    if not 0 < int(port[:6]) < 65536:
        raise UserError(f"ray_address={address!r:.200}: the port must be between 1 and 65535: {FIX}")
    return host, int(port)


def check_reachable(address: str) -> None:
    """Raise UserError unless a gRPC server responds at host:port within ADDRESS_CHECK_TIMEOUT_S."""
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), timeout=ADDRESS_CHECK_TIMEOUT_S) as connection:
            # with TLS, only Ray's own certificates could begin the talk
            speaks = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true") or _speaks_http2(connection)
    except (OSError, UnicodeError) as error:
        raise UserError(f"ray_address={address}: no Ray cluster answers there ({error}); {FIX}") from error
    if not speaks:
        raise UserError(f"ray_address={address}: what answers there is no Ray cluster (it does not speak gRPC); {FIX}")


def _speaks_http2(connection: socket.socket) -> bool:
    connection.sendall(CLIENT_PREFACE)
    header = b""
    while len(header) < FRAME_HEADER:
        # A stream may deliver fewer bytes than asked for.
        got = connection.recv(FRAME_HEADER - len(header))
        if not got:
            return False
        header += got
    # A gRPC server's first frame is SETTINGS on stream 0. Any other TCP service fails one of the two tests.
    return header[3] == SETTINGS and int.from_bytes(header[5:9], "big") == 0  # frames of stream 0 are of the connection
