"""Episodes in tables: what each reply is asked with, why episodes end, and the whole sentence of each failure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from core.errors import RunStopped, UserError
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.engines.base import Completion
from rollouts.episode import run_episode
from rollouts.opponents import Opponent, ServedOpponent, ServerFailed
from rollouts.stops import Stops
from rollouts.turns import EpisodeRules
from tools.benchmarks.simulated_run import run_in_virtual_time
from unit_tests.helpers.episodes import PROMPT, Duel, Scripted, Tool, Words, play, play_all
from unit_tests.helpers.sentences import tell

TOOL_SAID = {"role": "tool", "content": "9 9"}


@pytest.mark.parametrize(
    ("replies", "rules", "asked", "ids", "stop", "turns"),
    [
        ([[5]], {}, [([1, 2], 10, 100)], [1, 2, 5], "eos", 1.0),
        (
            [[3, 4], [5]],
            {},
            [([1, 2], 10, 100), ([1, 2, 3, 4, 9, 9], 6, 101)],
            [1, 2, 3, 4, 9, 9, 5],
            "eos",
            2.0,
        ),
        # the last of so many replies gets an answer that nobody reads
        (
            [[3], [3]],
            {"max_turns": 2},
            [([1, 2], 10, 100), ([1, 2, 3, 9, 9], 7, 101)],
            [1, 2, 3, 9, 9, 3],
            "turns",
            2.0,
        ),
        # an answer that leaves no token for a reply is not shown
        ([[3]], {"max_new_tokens": 3}, [([1, 2], 3, 100)], [1, 2, 3], "length", 1.0),
        (
            [[3], [5]],
            {"max_new_tokens": 4},
            [([1, 2], 4, 100), ([1, 2, 3, 9, 9], 1, 101)],
            [1, 2, 3, 9, 9, 5],
            "eos",
            2.0,
        ),
    ],
)
def test_the_budget_is_that_of_all_turns_and_answers(replies, rules, asked, ids, stop, turns):
    engine = Scripted(*replies)
    sample, _ = play(engine, **rules)
    assert engine.asked == asked and (sample.token_ids.tolist(), sample.stop) == (ids, stop)
    assert (sample.counts, sample.failure) == ({"turns": turns}, "")


def test_a_single_reply_is_not_counted():
    assert play(Scripted([5]), max_turns=1)[0].counts == {}


def test_a_reply_without_an_end_of_turn_is_closed_before_the_answer():
    class Chat(Words):
        def __init__(self):
            self.stop_token_ids, self.turn_end, self.written_ids = [2], [2, 6], frozenset(range(99))

    closed = {"stops": Stops(Chat(), [], [7])}  # type: ignore[arg-type]
    for reply, ids in (([3, 7], [1, 2, 3, 7, 2, 6, 9, 9, 5]), ([3, 2], [1, 2, 3, 2, 9, 9, 5])):
        sample, _ = play(Scripted(reply, [5]), **closed)
        assert sample.token_ids.tolist() == ids
        assert sample.turns == ((2, 4), (len(ids) - 1, len(ids))), "what closes a turn is not trained on"


def test_a_reply_that_was_cut_off_is_not_shown_to_the_environment():
    steps: list[Any] = []

    class Noting(Tool):
        async def step(self, reply):
            steps.append(reply.message["content"])
            return await super().step(reply)

    sample, messages = play(Scripted([3, 3], stop="length"), env=Noting())
    assert (sample.stop, steps) == ("length", []) and messages == [{"role": "assistant", "content": "3 3"}]


class Failing(Tool):
    """Raises in the methods that it is told to."""

    fails: Any = ()

    def fail(self, method: str) -> None:
        if method in self.fails:
            raise OSError(f"no {method}")

    async def open(self):
        self.fail("open")
        return []

    async def step(self, reply):
        self.fail("step")
        return None

    async def end(self):
        self.fail("end")

    def scores(self):
        self.fail("scores")
        return {"won": 1.0}

    def counts(self):
        self.fail("counts")
        return {"seen": 2.0}

    def turn_scores(self, player):
        self.fail("turn_scores")
        return [{"won": 1.0}]

    async def close(self):
        self.fail("close")


@pytest.mark.parametrize(
    ("fails", "failure", "counts", "n"),
    [
        ((), "", {"turns": 1.0, "seen": 2.0}, 1),
        (("open",), "open", {"turns": 0.0, "seen": 2.0}, 0),
        (("step",), "step", {"turns": 1.0, "seen": 2.0}, 1),
        (("end",), "end", {"turns": 1.0, "seen": 2.0}, 1),
        (("scores",), "scores", {"turns": 1.0, "seen": 2.0}, 1),
        (("counts",), "counts", {"turns": 1.0}, 1),
        (("turn_scores",), "turn_scores", {"turns": 1.0, "seen": 2.0}, 1),
        (("close",), "close", {"turns": 1.0, "seen": 2.0}, 1),
        # the first of several is told
        (("step", "scores", "counts", "close"), "step", {"turns": 1.0}, 1),
        (("counts", "scores"), "counts", {"turns": 1.0}, 1),
        (("scores", "turn_scores", "close"), "scores", {"turns": 1.0, "seen": 2.0}, 1),
    ],
)
def test_an_environment_that_raises_fails_its_sample_with_the_first_error(fails, failure, counts, n):
    env = Failing()
    env.fails = fails
    sample, _ = play(Scripted([5]), env=env)
    assert sample.counts == counts and sample.n_sampled == n
    assert sample.reward_parts == ({} if failure else {"won": 1.0})
    assert sample.failure == "" if not failure else sample.failure.startswith(f"OSError: no {failure} (")


def make(make_env: Any, opponent: Opponent | None = None, engine: Any = None, **more: Any) -> Any:
    given = {"seed_of_turn": lambda turn: 100 + turn, "max_new_tokens": 10, "max_turns": 3, "timeout_s": 9.0}
    rules = EpisodeRules(**given | more)
    episode = run_episode(engine or Scripted([5]), make_env, PROMPT, Words(), rules, opponent)
    return run_in_virtual_time(episode)


class Empty(Failing):
    """Has a length, which is 0."""

    def __len__(self):
        return 0


def test_an_environment_of_length_0_keeps_its_scores():
    [played] = make(lambda prompt: Empty(prompt))
    assert (played.sample.reward_parts, played.sample.counts) == ({"won": 1.0}, {"turns": 1.0, "seen": 2.0})


def test_an_environment_that_cannot_be_made_has_the_prompt_alone():
    def broken(prompt: Prompt) -> Any:
        raise OSError(f"no room for {prompt.id}")

    [played] = make(broken)
    assert played.sample.failure.startswith("OSError: no room for p (") and played.messages == []
    assert (played.sample.token_ids.tolist(), played.sample.prompt) == ([1, 2], PROMPT)
    assert (played.sample.counts, played.turn_scores, played.sample.player) == ({"turns": 0.0}, [], 0)
    for game, side in ((2, 0), (3, 1)):
        [played] = make(broken, Opponent(model=Scripted(), game=game))
        assert played.sample.failure.startswith("OSError: no room for p (") and played.sample.player == side
    for error in (UserError("the key is wrong"), RunStopped("the server is gone")):

        def refuse(prompt: Prompt, error: Exception = error) -> Any:
            raise error

        assert tell(lambda refuse=refuse: make(refuse), type(error)) == str(error)


def test_what_an_environment_says_wrong_is_told():
    class Says(Tool):
        answer_of: Any = None

        def step(self, reply):
            return self.answer_of

    async def nothing() -> list[Any]:
        return []

    for answer, said in (
        (None, "TypeError: Env.step() must be defined by `async def`, it returned None"),
        ("x" * 99, f"TypeError: Env.step() must be defined by `async def`, it returned '{'x' * 79}"),
    ):
        env = Says()
        env.answer_of = answer
        assert play(Scripted([3]), env=env)[0].failure.partition(" (")[0] == said

    class Silent(Tool):
        async def step(self, reply):
            return []

    told = "Env.step() returned no message: return None to end the episode"
    assert play(Scripted([3]), env=Silent())[0].failure == told


def test_an_environment_that_does_not_close_in_time_fails_its_sample():
    class Slow(Tool):
        async def close(self):
            await asyncio.sleep(self.seconds)

    for seconds, failure in ((8.9, ""), (9.1, "TimeoutError")):
        env = Slow()
        env.seconds = seconds  # type: ignore[attr-defined]
        [played] = make(lambda prompt, env=env: env)
        assert played.sample.failure.partition(" (")[0].partition(":")[0] == failure


def test_a_game_against_an_engine_has_the_sample_of_the_policys_side_alone():
    frozen = Scripted([4, 4], [6])
    engine = Scripted([3], [5])
    opponent = Opponent(model=frozen, game=6, version=12)
    [(sample, _)] = play_all(engine, env=Duel(), opponent=opponent, max_turns=9)
    assert (sample.player, sample.token_ids.tolist()) == (0, [1, 2, 7, 3, 4, 4, 5]) and sample.failure == ""
    counts = {"turns": 4.0, "game/opponent_version": 12.0, "game/won": 0.0, "game/drawn": 0.0}
    assert sample.counts == counts and sample.reward_parts == {"won": 0.0}
    assert [seed for *_, seed in engine.asked] == [100, 102] and [seed for *_, seed in frozen.asked] == [101, 103]
    # the game 5 leaves the other side to the policy, which had no turn
    [(sample, _)] = play_all(Scripted(), env=Duel(), opponent=replace(opponent, model=Scripted([6]), game=5))
    assert sample.failure == "the game ended before the policy's side (1) had a turn: rollout.opponent is set"
    assert (sample.player, sample.token_ids.tolist(), sample.counts) == (1, [1, 2], {"turns": 1.0})
    [(sample, _)] = play_all(Scripted(), env=Tool(), opponent=opponent)
    assert sample.failure == "Env.sides is 1, and rollout.opponent needs a game of two or more"


class Server(ServedOpponent):
    """Server of scripted replies that notes what it is asked."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.asked = list(replies), list[Any]()

    async def reply(self, messages, tools, *, max_new_tokens, seed):
        self.asked.append(([m["content"] for m in messages], [*tools], max_new_tokens, seed))
        said = self.replies.pop(0)
        if isinstance(said, Exception):
            raise said
        return None if said is None else ParsedReply(message={"role": "assistant", "content": said})


def test_a_server_is_shown_the_messages_of_its_side():
    env = Duel()
    env.tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]  # type: ignore[list-item]
    own: Any = {"type": "function", "function": {"name": "ask", "parameters": {}}}
    server = Server("4", "6")
    parser: Any = type(
        "Reader",
        (),
        {"parse": lambda self, ids, text, tools: ParsedReply(message={"role": "assistant", "content": text})},
    )()
    [(sample, messages)] = play_all(
        Scripted([3], [5]),
        env=env,
        prompt=replace(PROMPT, tools=[own]),
        opponent=Opponent(model=server, game=0),
        max_turns=9,
        parser=parser,
    )
    tools = [own, *env.tools]
    assert server.asked == [(["1 2", "3"], tools, 10, 101), (["1 2", "3", "4", "5"], tools, 10, 103)]
    assert sample.token_ids.tolist() == [1, 2, 7, 3, 4, 5] and [m["content"] for m in messages] == ["3", "4", "5"]
    assert sample.counts == {"turns": 4.0, "game/won": 0.0, "game/drawn": 0.0}


@pytest.mark.parametrize(("said", "failure", "turns"), [(None, "", 2.0), (ServerFailed("no answer"), "no answer", 1.0)])
def test_a_server_that_is_cut_off_or_fails_ends_the_game(said, failure, turns):
    [(sample, _)] = play_all(Scripted([3]), env=Duel(), opponent=Opponent(model=Server(said), game=0), max_turns=9)
    assert (sample.failure, sample.counts["turns"]) == (failure, turns)
    assert sample.token_ids.tolist() == [1, 2, 7, 3]


def test_a_game_of_two_sides_ends_for_both_at_the_last_reply():
    (first, _), (second, _) = play_all(Scripted([3], [4]), env=Duel(), max_turns=2)
    assert (first.stop, second.stop, first.player, second.player) == ("turns", "turns", 0, 1)


@pytest.mark.parametrize(
    ("result", "found", "said"),
    [
        ("won", {"game/won": 1.0, "game/drawn": 0.0}, ""),
        ("drawn", {"game/won": 0.0, "game/drawn": 1.0}, ""),
        ("lost", {"game/won": 0.0, "game/drawn": 0.0}, ""),
        (None, {}, ""),
        ("tie", {}, "ValueError: Env.result_of() must return won, drawn, lost or None, and returned 'tie'"),
    ],
)
def test_the_result_of_a_game_is_counted_once(result, found, said):
    class Ends(Duel):
        async def step(self, reply):
            return None

        def turn_scores(self, player):
            return []

        def result_of(self, player):
            assert player == 0
            return result

    [(sample, _)] = play_all(Scripted([3]), env=Ends(), opponent=Opponent(model=Scripted(), game=2))
    assert sample.counts == {"turns": 1.0} | found
    assert sample.failure.partition(" (")[0] == said


def test_routes_are_asked_of_the_policy_alone():
    class Plain(Scripted):
        async def generate(self, token_ids, *, max_new_tokens, seed):
            return Completion(token_ids=[6], logp=[-1.0], versions=[0], stop="eos")

    def one(first: int) -> str:
        opponent = Opponent(model=Plain(), game=first)
        return tell(lambda: play_all(Plain(), env=Duel(), opponent=opponent, is_routed=True), RunStopped)

    told = "the engine (rollout.engine) returned no routes, and rollout.router_replay is set: correct its generate()"
    assert one(0) == told
    [(sample, _)] = play_all(Plain(), env=Duel(), opponent=Opponent(model=Plain(), game=1), is_routed=True)
    assert sample.failure == "the game ended before the policy's side (1) had a turn: rollout.opponent is set"
