"""TextArena games in self-play. Each player has a separate conversation and sample.

Columns of the row: `game` is the game's id ("TicTacToe-v0"), `players` the number of players (default 2), and
`game_seed` the seed of the reset. All episodes of a row start in the same state.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

from core.errors import UserError, name_error
from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env


class TextArena(Env):
    """TextArena game. A player's scores are `return`, `invalid_move` and `finished`.

    A game cut off by the limits on turns or tokens has no winner: `return` and `finished` are 0 for every player.
    """

    sides = 2

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.game: Any = None
        self.rewards: dict[int, float] = {}
        self.told: dict[int, dict[str, Any]] = {}
        self._random = random.Random(0).getstate()

    async def open(self) -> list[Message]:
        """Start the game. Return the rules for the first player."""
        name, players, seed = (self.prompt.extra.get(key) for key in ("game", "players", "game_seed"))
        if not isinstance(name, str):
            raise UserError(
                f"rollout.env=textarena: the row {self.prompt.id} must name a game in its column game, found "
                f"{name!r:.60}"
            )
        with self._own_random():
            self.game = make_game(name, self.prompt.id)
            self.sides = players or 2
            self.game.reset(num_players=self.sides, seed=seed or 0)
            return self._show_next_player()

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        """Perform the move of a reply. Return the news for the next player."""
        with self._own_random():
            done, _ = self.game.step(action=reply.message["content"])
            if done:
                rewards, self.told = self.game.close()
                self.rewards = {int(player): float(reward) for player, reward in (rewards or {}).items()}
                return None
            return self._show_next_player()

    def scores_of(self, player: int) -> dict[str, float]:
        return {
            "return": self.rewards.get(player, 0.0),
            "invalid_move": float(bool(self.told.get(player, {}).get("invalid_move"))),
            "finished": float(bool(self.told)),
        }

    def result_of(self, player: int) -> Literal["won", "drawn", "lost"] | None:
        """Compare the player's reward with the best of the others."""
        if not self.told or player not in self.rewards:
            return None
        mine = self.rewards[player]
        best = max((reward for other, reward in self.rewards.items() if other != player), default=mine)
        return "drawn" if mine == best else "won" if mine > best else "lost"

    def _show_next_player(self) -> list[Message]:
        """Return observations that are new to the next player, without the player's own moves."""
        state = self.game.state
        self.player = int(state.current_player_id)
        seen = state.get_current_player_observation()
        news = [text for sender, text, kind in seen if not (sender == self.player and kind.name == "PLAYER_ACTION")]
        # a player without news still needs a turn to reply to
        return [{"role": "user", "content": "\n".join(news) or "It is your turn."}]

    @contextmanager
    def _own_random(self) -> Generator[None]:
        """Run the body with this game's random state. The library uses Python's global one, shared by all games."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def make_game(name: str, row: str) -> Any:
    """Create a game. Raises UserError for an unknown name."""
    try:
        import textarena
    except ImportError as error:
        raise UserError(
            "rollout.env=textarena: the package textarena is not installed: pip install -c constraints.txt textarena"
        ) from error
    try:
        return textarena.make(env_id=name)
    except Exception as error:  # a border: the library raises ValueError, or what a game's data lacks
        raise UserError(f"rollout.env=textarena: the row {row}: {name}: {name_error(error)}") from error
