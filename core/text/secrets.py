"""Remove passwords and tokens from text for run folders, terminals and trackers."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
# The dates of a signature, too: a renewed one has others.
_IN_QUERY = "password|passwd|pwd|token|secret|api_?key|access_?key|signature|credential|expires|(?:amz|goog)-date"
_OF_AZURE = "sig|se|st"
# With or without a colon: a token may stand alone in the place of user and password.
_USER_INFO = re.compile(r"(?<=//)[^/@\s]*@")
_QUERY = re.compile(rf"([?&](?:[\w.-]*(?:{_IN_QUERY})[\w.-]*|{_OF_AZURE})=)[^&\s'\")]*", re.IGNORECASE)
# Tokens of a text are no secrets, such as stop_token.
_OF_TEXT = (
    "stop|eos|bos|pad|unk|sep|cls|mask|start|end|turn|think|thinking|tool|image|video|audio|vision|answer|special|per"
)
# A key that names a column or a place is none, such as answer_key. Every other is: nobody can list all services.
_OF_DATA = (
    "answer|question|problem|solution|prompt|response|completion|chosen|rejected|reward|score|metric|label|target|input|"
    "output|text|content|message|messages|image|video|audio|row|column|field|record|id|name|type|task|data|dataset|split|"
    "primary|foreign|unique|public|sort|order|group|partition|join|index|lookup|map|dict|json|object|cache|state|timeout|fn"
)
_WORDS = "mon|don|tur|joc|whis|hoc|hot|lac"
_KEY = re.compile(
    rf"^(?!(.*[_-])?({_OF_DATA}|{_WORDS})[_-]?key$).+key$"
    r"|(^|[_-])(password|passwd|passphrase|secret|credentials?|(proxy[_-])?authorization)$"
    rf"|^(?!(.*[_-])?({_OF_TEXT})[_-]?token$)(.*[_-])?((auth|access|api|bearer|hf|hub)?token)$",
    re.IGNORECASE,
)


def hide_secrets(text: str) -> str:
    """Replace user, password and tokens of addresses in a text by ***.

    >>> hide_secrets("no answer from https://ann:hunter2@host:5000/api?access_token=abc&x=1")
    'no answer from https://***@host:5000/api?access_token=***&x=1'
    >>> hide_secrets("https://bucket.host/rows.jsonl?X-Amz-Signature=9f&X-Amz-Date=2026&part=2")
    'https://bucket.host/rows.jsonl?X-Amz-Signature=***&X-Amz-Date=***&part=2'
    >>> hide_secrets("https://store.host/rows.jsonl?sv=2024&se=2026&sig=9f")
    'https://store.host/rows.jsonl?sv=2024&se=***&sig=***'
    """
    return _QUERY.sub(rf"\1{HIDDEN}", _USER_INFO.sub(f"{HIDDEN}@", text))


def has_secret(address: str) -> bool:
    """Tell whether an address contains a user, a password or a token.

    >>> has_secret("http://host:5000"), has_secret("postgresql://ann:hunter2@host/db"), has_secret("sqlite:////a.db")
    (False, True, False)
    """
    return hide_secrets(address) != address


def refuse_secret(address: str | None, instead: str) -> None:
    """Raise ValueError for the address of a recipe that contains a secret. instead: the fix, after "put"."""
    if address is not None and has_secret(address):
        raise ValueError(
            "the address holds a user, a password or a token, and a recipe is copied into the run folder: put "
            f"{instead}"
        )


def hide_settings(value: Any, key: str = "") -> Any:
    """Return a configuration without secrets: texts under keys such as api_key, and those in addresses.

    >>> hide_settings({"reward": {"settings": {"api_key": "abc", "stop_token": "x"}}, "max_tokens": 3})
    {'reward': {'settings': {'api_key': '***', 'stop_token': 'x'}}, 'max_tokens': 3}
    """
    if isinstance(value, dict):
        return {name: hide_settings(below, str(name)) for name, below in value.items()}
    if isinstance(value, list | tuple):
        # The items of a list have no keys of their own: a list under `api_key` is secret as a whole.
        return [hide_settings(below, key) for below in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if _KEY.search(key) and value else hide_secrets(value)
