"""Safe embedding of data in HTML: it cannot become markup, a script, or a request."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from typing import Any


def to_json(value: Any) -> str:
    r"""Return JSON for a script element: without `<`, so `</script>` and `<!--` cannot occur.

    >>> to_json("</script>")
    '"\\u003c/script>"'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def pack(value: Any) -> str:
    """Return gzipped JSON in base64. Equal values give equal bytes."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # gzip writes the time into its header: zero keeps equal pages equal
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def data_element(name: str, packed: str) -> str:
    """Return a script element with packed data, which a browser neither shows nor runs."""
    return f'<script type="application/gzip" id="{name}">{packed}</script>\n'


def policy(script: str, *, files_beside: bool) -> str:
    """Return a content security policy: one inline script, optionally files beside the page, no network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    beside = " 'self' file:" if files_beside else ""
    return f"default-src 'none'; script-src 'sha256-{digest}'{beside}; style-src 'unsafe-inline'"
