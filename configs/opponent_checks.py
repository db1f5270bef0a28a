"""Checks of `rollout.opponent`."""

from __future__ import annotations

from core.errors import quote
from core.text.addresses import is_http_address
from core.text.secrets import has_secret


def is_server(opponent: str | None) -> bool:
    """Tell whether an opponent is behind a server."""
    return opponent is not None and opponent.startswith(("http://", "https://"))


def check_opponent(opponent: str | None, every: int | None, *, is_game: bool) -> None:
    """Raise ValueError for an opponent without a game, or a bad address of one. every: opponent_every."""
    if opponent is not None and not is_game:
        raise ValueError(
            "opponent is the other side of a game: set rollout.env to a game, or leave rollout.opponent out"
        )
    if (opponent == "policy") != (every is not None):
        raise ValueError("opponent: policy and opponent_every belong together: set both, or leave both out")
    if opponent is None or not is_server(opponent):
        return
    if has_secret(opponent):
        raise ValueError("opponent contains a password or key: name the address of a server that needs none")
    if not is_http_address(opponent):
        raise ValueError(f"opponent must be an address like http://host:8000/v1, found {quote(opponent)}")
