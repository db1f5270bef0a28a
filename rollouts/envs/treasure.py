"""Game of one or two turns: take a coin, or pay to open a box and name the letter inside.

The prompt states the coin's value, in tenths. In the first turn, `a` takes the coin and ends the game. `b` costs a
tenth and opens the box, which shows a letter, the row's answer. In the second turn, a reply of that letter earns eight
tenths. Any other reply earns nothing and ends the game. Rewards come with each turn. The best policy is known: take a
coin above seven tenths, else open the box. data_prep/treasure.py makes rows.
"""

from __future__ import annotations

from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.envs.base import Env

TAKE, OPEN = "a", "b"
FEE, PRIZE = 0.1, 0.8


class Treasure(Env):
    """Treasure game of one row."""

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.coin = int(prompt.messages[-1]["content"]) / 10
        self.earned: list[float] = []

    async def step(self, reply: ParsedReply) -> list[Message] | None:
        move, first = reply.message["content"], not self.earned
        if first and move == OPEN:
            self.earned.append(-FEE)
            return [{"role": "user", "content": self.prompt.answer}]
        # any other reply earns nothing, and ends the game
        wins = {TAKE: self.coin} if first else {self.prompt.answer: PRIZE}
        self.earned.append(wins.get(move, 0.0))
        return None

    def scores(self) -> dict[str, float]:
        return {"earned": sum(self.earned)}

    def turn_scores(self, player: int) -> list[dict[str, float]]:
        return [{"earned": value} for value in self.earned]


def best_return(coin: float) -> float:
    """Return the expected return of the best policy for a coin of this value."""
    return max(coin, PRIZE - FEE)
