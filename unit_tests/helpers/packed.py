"""Data in a run page: gzipped JSON in base64."""

import base64
import gzip
import json
from typing import Any


def unpack(packed: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(packed)))
