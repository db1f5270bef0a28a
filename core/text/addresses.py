"""Addresses of HTTP servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_http_address(text: str) -> bool:
    """Tell whether a text is the address of an HTTP server.

    >>> [is_http_address(text) for text in ("http://host:8000/v1", "https://[::1]/v1", "host:8000", "http://host:80OO")]
    [True, True, False, False]
    """
    try:
        parts = urlsplit(text)
        # a port that is no number, or above 65535, raises ValueError when it is read
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https") and not any(c.isspace() for c in text)
