"""Put data into HTML so that nothing in it can become markup, a script, or a request."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from typing import Any


def to_json(value: Any) -> str:
    r"""Return JSON that may stand within a script element: without `<`, so `</script>` and `<!--` cannot occur.

    >>> to_json("</script>")
    '"\\u003c/script>"'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def pack(value: Any) -> str:
    """Return gzipped JSON in base64; the same bytes for the same value."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def data_element(name: str, packed: str) -> str:
    """Return an element that a browser neither shows nor runs."""
    return f'<script type="application/gzip" id="{name}">{packed}</script>\n'


def script_hash(script: str) -> str:
    """Return the source expression of an inline script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def policy(script: str, *, files_beside: bool) -> str:
    """Return a content security policy: this one script, files beside the page where there are some, and no network."""
    beside = " 'self' file:" if files_beside else ""
    return f"default-src 'none'; script-src {script_hash(script)}{beside}; style-src 'unsafe-inline'"
