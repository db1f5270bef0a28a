"""A hook of mkdocs: links that leave docs/ work in the repository, and are plain text on the site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace a link to a file outside docs/ by its text."""
    folder = posixpath.dirname(page.file.src_uri)

    def text_or_link(found: re.Match[str]) -> str:
        # the site holds docs/ alone, so a link to a file of code would be broken there
        leaves = posixpath.normpath(posixpath.join(folder, found[2])).startswith("..")
        return found[1] if leaves else found[0]

    return LINK.sub(text_or_link, markdown)
