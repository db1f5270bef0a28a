"""Pages of reports as a browser sees them and the data in them, and runs with hostile texts."""

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = (
    "<img src=x onerror=\"document.title='hacked'\">",
    "</script><script>document.title='hacked'</script>",
    "<!--",
)


class Elements(HTMLParser):
    """The elements of a page as a browser would see them, and the text of its scripts."""

    def __init__(self, page: Path):
        super().__init__()
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self._inside: str | None = None
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self._inside = dict(attrs).get("id", "code")
            self.scripts[self._inside] = ""

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.scripts[self._inside] += data


def unpack(packed: str) -> Any:
    """The data of a run page: gzipped JSON in base64."""
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def rewrite_sample(run: Path, step: int, number: int, **changes: object) -> None:
    file = run / "samples" / f"step_{step:05d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[number] |= changes
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
