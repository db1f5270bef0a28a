"""Assembly of an HTML page from data, style and a script, without external requests."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.report.embed import policy, to_json
from core.errors import UserError

ASSETS = Path(__file__).parent / "assets"
UPLOT = Path(__file__).parent / "vendor" / "uplot"
STYLES = ("style.css", "samples.css")


def make_html(
    *, title: str, head: dict[str, Any], blocks: Sequence[str], script: str, style: str = "", files_beside: bool = False
) -> str:
    """Return the text of a page. head: data read at once. blocks: elements with data read on request.

    style: precedes ours.
    """
    filled = {
        "POLICY": html.escape(policy(script, files_beside=files_beside)),
        "TITLE": html.escape(title),
        "STYLE": style + "".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES),
        "HEAD": to_json(head),
        "BLOCKS": "".join(blocks),
        "SCRIPT": script,
    }
    # one pass over the template: a text that is filled in may itself contain @@
    pieces = (ASSETS / "page.html").read_text(encoding="utf-8").split("@@")
    return "".join(filled[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def join_scripts(names: Sequence[str], *, library: str = "") -> str:
    """Return files of assets/ as one script, after a library. They share a private scope."""
    own = "\n".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in names)
    script = f'{library}\n(() => {{\n"use strict";\n{own}\n}})();\n'
    # the script is inlined as it is, and either text would end its element
    assert "</script" not in script.lower() and "<!--" not in script
    return script


def save_page(out: Path, text: str, *, key: str) -> str:
    """Write a page; return a message with the size. Raises a UserError that begins with `key`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{key} {out} cannot be written: {error.strerror or error}") from error
    return f"page: {out} ({len(text) / 1e6:.1f} MB)"
