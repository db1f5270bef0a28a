"""Games of TextArena, in which the policy plays both sides."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from core.errors import UserError
from core.types.samples import Prompt
from rollouts.engines.base import Completion
from rollouts.envs.textarena import TextArena
from rollouts.episode import run_episode
from rollouts.registry import load_env_class, resolve_env
from rollouts.turns import EpisodeRules
from unit_tests.helpers.other_packages import install_beside


class Words:
    """Every word is a token, and decodes to itself."""

    images = None

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def render(self, messages, tools=()):
        return [i for m in messages for i in self.encode(f"<{m['role']}> {m['content']}")]

    def render_turns(self, reply, answers, tools=()):
        return self.render(answers)

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)

    def bound_tokens(self, messages, *, limit, tools=()):
        return None


class Moves:
    """Replies with the next of these moves; `asked` holds what it saw."""

    def __init__(self, tokenizer: Words, *moves: str) -> None:
        self.tokenizer, self.moves, self.asked = tokenizer, list(moves), []

    async def generate(self, token_ids, *, max_new_tokens, seed):
        self.asked.append(self.tokenizer.decode(token_ids))
        ids = self.tokenizer.encode(self.moves.pop(0))
        return Completion(token_ids=ids, logp=[-1.0] * len(ids), versions=[0] * len(ids), stop="eos")


@pytest.fixture(scope="module")
def textarena() -> None:
    """The package, which is in no set: only its games need it."""
    sys.path.append(str(install_beside("textarena")))


def play(*moves: str, max_turns: int = 20, **extra):
    tokenizer = Words()
    engine = Moves(tokenizer, *moves)
    prompt = Prompt(id="row", messages=[{"role": "system", "content": "play"}], extra={"game": "TicTacToe-v0"} | extra)
    rules = EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=2000, max_turns=max_turns, timeout_s=60.0)
    return asyncio.run(run_episode(engine, TextArena, prompt, tokenizer, rules)), engine


def test_without_the_package_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    env = load_env_class(resolve_env("textarena"))(Prompt(id="1", messages=[], extra={"game": "TicTacToe-v0"}))
    with pytest.raises(UserError, match="the package textarena is not installed: pip install"):
        asyncio.run(env.open())
    with pytest.raises(UserError, match="must name a game in its column game, found None"):
        asyncio.run(TextArena(Prompt(id="1", messages=[])).open())


@pytest.mark.verify
@pytest.mark.usefixtures("textarena")
def test_both_players_of_a_game_are_samples_with_rewards_of_their_own():
    (first, second), engine = play("[0]", "[4]", "[1]", "[8]", "[2]")
    for i, one in enumerate((first, second)):
        sample = one.sample
        assert not sample.failure, sample.failure
        assert sample.prompt.messages[0] == {"role": "system", "content": "play"}
        assert f"Player {i}" in sample.prompt.messages[1]["content"]
        assert sample.player == i
    assert [m["content"] for m in first.messages if m["role"] == "assistant"] == ["[0]", "[1]", "[2]"]
    assert [m["content"] for m in second.messages if m["role"] == "assistant"] == ["[4]", "[8]"]
    assert first.sample.reward_parts == {"return": 1.0, "invalid_move": 0.0, "finished": 1.0}
    assert second.sample.reward_parts["return"] == -1.0
    assert len(first.sample.turns) == 3 and len(second.sample.turns) == 2
    assert engine.asked[2].startswith(engine.asked[0] + " [0] "), "a conversation only grows"
    assert first.sample.n_sampled == 3, "what the other said is not trained on"


@pytest.mark.verify
@pytest.mark.usefixtures("textarena")
def test_an_invalid_move_and_an_unfinished_game_are_told():
    [only], _ = play("I do not know", "[9]", "[99]")
    assert only.sample.reward_parts["invalid_move"] == 1.0 and only.sample.reward_parts["return"] < 0
    (first, second), _ = play("[0]", "[1]", max_turns=2)
    assert (
        first.sample.reward_parts
        == second.sample.reward_parts
        == {
            "return": 0.0,
            "invalid_move": 0.0,
            "finished": 0.0,
        }
    )


@pytest.mark.verify
@pytest.mark.usefixtures("textarena")
def test_games_at_the_same_time_draw_their_own_random_numbers():

    def open_game(seed: int) -> str:
        prompt = Prompt(id="1", messages=[], extra={"game": "KuhnPoker-v0", "game_seed": seed})
        return asyncio.run(TextArena(prompt).open())[0]["content"]

    random.seed(5)
    outside = random.getstate()
    assert open_game(1) == open_game(1)
    assert len({open_game(seed) for seed in range(8)}) > 1
    assert random.getstate() == outside, "the process keeps its own"


@pytest.mark.verify
@pytest.mark.usefixtures("textarena")
def test_a_game_that_is_not_there_is_one_sentence():
    with pytest.raises(UserError, match="the row row: NoSuchGame-v0: "):
        play("x", game="NoSuchGame-v0")


@pytest.mark.parametrize("rewards, results", [((1, -1), ("won", "lost")), ((0, 0), ("drawn",) * 2), ((), (None,) * 2)])
def test_the_result_of_a_game_compares_the_rewards(rewards, results):
    env = TextArena(Prompt(id="1", messages=[]))
    assert env.result_of(0) is None, "a game that is not over"
    env.told, env.rewards = {0: {}}, dict(enumerate(rewards))
    assert (env.result_of(0), env.result_of(1)) == results
