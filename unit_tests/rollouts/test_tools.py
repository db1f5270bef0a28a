"""Environments whose tools are Python functions: how they are described, called, answered and counted."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Literal

import pytest

from core.errors import RunStopped, UserError
from core.types.samples import Prompt, Sample
from data_feeds.chat.tool_parsing import ParsedReply
from data_prep import tiny_model
from driver.records.episode_metrics import measure_counts
from driver.records.sample_files import make_sample_record
from driver.records.sample_text import write_sample
from rewards.sandbox.base import SandboxUnavailable
from rollouts.engines.base import Completion
from rollouts.envs.base import Env
from rollouts.registry import list_env_tools, load_env_class, resolve_env
from rollouts.tools.calls import ToolFailed, ToolUnavailable
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import make_spec, make_tool, tool
from unit_tests.helpers.episodes import PROMPT, Tool, Words, calls_of, play, said

AT_ONCE = 64


def multiply(a: int, b: float = 2.0) -> float:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


class Desk(ToolEnv):
    """Tools of every kind, most of them bad."""

    functions = (multiply,)
    tool_timeout_s = 5.0

    def __init__(self, prompt: Prompt) -> None:
        self.notes: list[str] = []

    @tool
    def note(self, text: str) -> dict[str, int]:
        """Write a note.

        Args:
            text: what to write
        """
        self.notes.append(text)
        return {"notes": len(self.notes)}

    @tool
    async def look(self, where: Literal["here", "there"]) -> str:
        """Look somewhere.

        Args:
            where: the place
        """
        await asyncio.sleep(0)
        return f"nothing {where}"

    @tool
    def fail(self) -> str:
        """Fail."""
        raise ValueError("no paper")

    @tool
    def leave(self) -> str:
        """Leave."""
        raise SystemExit(3)

    @tool
    def refuse(self) -> str:
        """Refuse."""
        raise ToolFailed("the desk is closed")

    @tool
    def draw(self) -> Any:
        """Return what is no JSON."""
        return {1, 2}


def answer(env: Env, reply: ParsedReply):
    return asyncio.run(env.step(reply))


def test_a_tool_is_described_by_its_signature_and_its_docstring():
    assert [spec["function"]["name"] for spec in Desk.tools][:2] == ["note", "look"]
    assert make_spec(multiply) == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "number", "description": "the second"},
                },
                "required": ["a"],
            },
        },
    }
    note, look = (spec["function"]["parameters"]["properties"] for spec in Desk.tools[:2])
    assert [*note] == ["text"], "no self"
    assert look["where"]["enum"] == ["here", "there"]


def many(
    a: int | None,
    b: Literal["x", "y"] | None,
    c: list[str | None],
    d: dict[str, list[int | None]],
    e: int | str | None = 3,
    f: tuple[int, str] = (1, "a"),
    g: Any | None = None,
    h: list[int] | str | None = None,
) -> float:
    """Do many things.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H

    Returns:
        what is done
    """
    return 1.0


def test_every_type_of_json_has_its_schema():
    whole, null = {"type": "integer"}, {"type": "null"}
    assert make_spec(many)["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"], "description": "A"},
            "b": {"type": ["string", "null"], "enum": ["x", "y", None], "description": "B"},
            "c": {"type": "array", "items": {"type": ["string", "null"]}, "description": "C"},
            "d": {
                "type": "object",
                "additionalProperties": {"type": "array", "items": {"type": ["integer", "null"]}},
                "description": "D",
            },
            "e": {"type": ["integer", "string", "null"], "description": "E"},
            "f": {"type": "array", "prefixItems": [whole, {"type": "string"}], "description": "F"},
            "g": {"description": "G"},
            "h": {"anyOf": [{"type": "array", "items": whole}, {"type": "string"}, null], "description": "H"},
        },
        "required": ["a", "b", "c", "d"],
    }
    known, given = make_tool(many), {"a": None, "b": None, "c": ["x", None], "d": {"x": [1, None]}}

    def find_misfit(**more: Any) -> str:
        return known.find_misfit({"name": "many", "arguments": given | more})

    assert known.name == "many" and find_misfit() == find_misfit(e=None, g=None, h=None) == find_misfit(g=[None]) == ""
    assert find_misfit(b="z").startswith("The arguments of many do not fit its schema: b: 'z' is not one of")
    assert find_misfit(z=1) == "many has no argument z; it has a, b, c, d, e, f, g, h."
    alone = known.find_misfit({"name": "many", "arguments": {"a": 1}})
    assert alone == "The arguments of many do not fit its schema: 'b' is a required property."


class Text:
    pass


def no_docstring(a: int) -> int:
    return a


def no_annotation(a) -> int:
    """Do."""


def no_line(a: int) -> int:
    """Do."""


def no_json(a: Text) -> int:
    """Do.

    Args:
        a: what
    """


NO_TOOLS = {
    no_docstring: "it has no docstring|because it has no docstring",
    no_annotation: "Argument a is missing a type hint",
    no_line: "no description for the argument 'a'",
    no_json: "the argument 'a' has the type Text, which is not one of JSON's",
}


@pytest.mark.parametrize("function", NO_TOOLS, ids=lambda function: function.__name__)
def test_a_function_that_cannot_be_described_is_one_sentence(function):
    with pytest.raises(UserError, match=f"Mine: the tool '{function.__name__}'.*({NO_TOOLS[function]})"):
        type("Mine", (ToolEnv,), {"functions": (function,)})
    with pytest.raises(UserError, match="two tools that are called multiply"):
        type("Mine", (ToolEnv,), {"functions": (multiply, multiply)})


class Choosy(ToolEnv):
    """A tool with arguments that may be null."""

    @tool
    def pick(self, n: int | None, kind: Literal["a", "b"] | None = None) -> str:
        """Pick.

        Args:
            n: how many
            kind: of which kind
        """
        return f"{n} {kind}"


def test_an_argument_that_may_be_null_may():
    answers = answer(Choosy(PROMPT), calls_of(("pick", {"n": None}), ("pick", {"n": 1, "kind": None})))
    assert [a["content"] for a in answers or []] == ["None None", "1 None"]


def test_the_calls_of_a_reply_are_answered_in_their_order():
    env = Desk(PROMPT)
    answers = answer(env, calls_of(("multiply", {"a": 3}), ("look", {"where": "here"}), ("note", {"text": "x"})))
    assert answers == [
        {"role": "tool", "content": "6.0", "tool_call_id": "call_0", "name": "multiply"},
        {"role": "tool", "content": "nothing here", "tool_call_id": "call_1", "name": "look"},
        {"role": "tool", "content": '{"notes": 1}', "tool_call_id": "call_2", "name": "note"},
    ]
    assert env.notes == ["x"]
    assert answer(env, said("done")) is None, "a reply without a call ends the episode"


FITS_NOT = "Error: The arguments of"
WRONG = {
    ("write", "{}"): (
        "unknown",
        "Error: There is no function write; there are note, look, fail, leave, refuse, draw",
    ),
    ("note", "{}"): ("arguments", f"{FITS_NOT} note do not fit its schema: 'text' is a required property."),
    ("note", "{'text': 3}"): ("arguments", f"{FITS_NOT} note do not fit its schema: text: 3 is not of type 'string'."),
    ("note", "{'text': 'x', 'at': 1}"): ("arguments", "Error: note has no argument at; it has text."),
    ("multiply", "{'a': True}"): ("arguments", "a: True is not of type 'integer'"),
    ("multiply", "{'a': 1.5}"): ("arguments", "a: 1.5 is not of type 'integer'"),
    ("look", "{'where': 'up'}"): ("arguments", "where: 'up' is not one of ['here', 'there']"),
    ("fail", "{}"): ("raised", "Error: fail raised ValueError: no paper"),
    ("leave", "{}"): ("raised", "Error: leave raised SystemExit: 3"),
    ("refuse", "{}"): ("raised", "Error: the desk is closed"),
    ("draw", "{}"): ("raised", "which is neither text nor JSON"),
}


@pytest.mark.parametrize(("name", "arguments"), WRONG, ids=str)
def test_whatever_is_wrong_with_a_call_is_one_sentence_and_counted(name, arguments):
    kind, words = WRONG[name, arguments]
    env = Desk(PROMPT)
    [message] = answer(env, calls_of((name, eval(arguments))))
    assert message["role"] == "tool" and message["tool_call_id"] == "call_0" and words in message["content"]
    assert "\n" not in message["content"] and message["content"].startswith("Error: ")
    counts = env.counts()
    assert (counts["tool_calls"], counts["tool_errors"], counts[f"tool_errors/{kind}"]) == (1, 1, 1)


def test_a_call_that_cannot_be_read_is_answered_too():
    env = Desk(PROMPT)
    broken = ParsedReply(message={"role": "assistant", "content": "<call>{"}, refusal="the JSON ends too early")
    assert answer(env, broken) == [{"role": "tool", "content": "Error: the JSON ends too early"}]
    assert env.counts()["tool_errors/unreadable"] == 1


class Stuck(ToolEnv):
    """Tools that never return, in a thread and on the loop."""

    tool_timeout_s = 0.05

    def __init__(self, prompt: Prompt) -> None:
        self.end = threading.Event()

    @tool
    def hang(self) -> str:
        """Hang."""
        self.end.wait(60)
        return "late"

    @tool
    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(60)
        return "late"

    @tool
    async def block(self) -> str:
        """Hold the process."""
        while True:
            pass


def test_a_tool_that_takes_too_long_is_answered():
    env = Stuck(PROMPT)
    answers = answer(env, calls_of(("hang", {}), ("wait", {})))
    env.end.set()
    assert [a["content"] for a in answers] == [
        "Error: hang took longer than 0.05 seconds.",
        "Error: wait took longer than 0.05 seconds.",
    ]
    assert env.counts()["tool_errors/timeout"] == 2


def test_a_tool_that_holds_the_process_ends_the_run_with_its_line():
    with pytest.raises(RunStopped, match=r"the tool block blocked the process for Stuck.tool_timeout_s.*test_tools.py"):
        answer(Stuck(PROMPT), calls_of(("block", {})))


@pytest.mark.parametrize(
    "error",
    [RunStopped("stop"), UserError("wrong"), ToolUnavailable("no server"), SandboxUnavailable("no bwrap")],
    ids=repr,
)
def test_errors_that_are_not_the_policys_pass_through(error):
    class Mine(ToolEnv):
        @tool
        def stop(self) -> str:
            """Stop."""
            raise error

        @tool
        async def wait(self) -> str:
            """Wait."""
            await asyncio.sleep(60)
            return ""

    with pytest.raises(type(error)):
        answer(Mine(PROMPT), calls_of(("wait", {}), ("stop", {})))


class Meeting(ToolEnv):
    """Calls that return only once all others are there: a queue would never end."""

    def __init__(self, prompt: Prompt) -> None:
        self.here = threading.Barrier(3)

    @tool
    def meet(self) -> int:
        """Wait for the others."""
        return self.here.wait(20) * 0


def test_the_calls_of_one_reply_run_at_the_same_time():
    env = Meeting(PROMPT)
    assert [a["content"] for a in answer(env, calls_of(*[("meet", {})] * 3))] == ["0"] * 3


class Ordered(Meeting):
    """One call at a time."""

    parallel_calls = False

    def __init__(self, prompt: Prompt) -> None:
        self.here, self.inside, self.most = threading.Barrier(1), 0, 0

    @tool
    async def enter(self) -> int:
        """Enter, and leave later."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.001)
        self.inside -= 1
        return self.most


def test_calls_may_have_to_wait_for_each_other():
    assert [a["content"] for a in answer(Ordered(PROMPT), calls_of(*[("enter", {})] * 3))] == ["1"] * 3


class Calls:
    """Reader of replies of words: 3 calls `look`, 4 calls it wrongly, 5 calls nothing."""

    def parse(self, ids, text, tools):
        if text.startswith("4"):
            return ParsedReply(message={"role": "assistant", "content": text}, refusal="there is no 4")
        if text.startswith("3"):
            return calls_of(("look", {"where": "here"}))
        return ParsedReply(message={"role": "assistant", "content": text})


class Answered(Words):
    """Writes every tool as one word, and every answer as one."""

    def render(self, messages, tools=()):
        return [1] * len(tools) + [9 if m["role"] == "tool" else 2 for m in messages]


class Policy:
    """Says 3, then 4, then 5, in each episode; `most` counts how many wait for a reply at once."""

    async def generate(self, token_ids, *, max_new_tokens, seed):
        await asyncio.sleep(0)
        word = 3 + sum(token == 9 for token in token_ids)
        return Completion(token_ids=[word], logp=[-1.0], versions=[0], stop="eos")


def test_an_episode_with_tools_from_the_prompt_to_the_files():
    sample, messages = play(Policy(), env=Desk(PROMPT), tokenizer=Answered(), max_turns=5, parser=Calls())
    assert sample.token_ids.tolist() == [1] * 7 + [2, 3, 9, 4, 9, 5]
    assert sample.turns == ((8, 9), (10, 11), (12, 13))
    assert [m["role"] for m in messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert sample.prompt.tools == Desk.tools
    counts = {name: value for name, value in sample.counts.items() if name != "tool_seconds"}
    assert counts == {"turns": 3, "tool_calls": 2, "tool_errors": 1, "tool_errors/unreadable": 1}
    check_record(sample)
    measured = measure_counts([sample, sample])
    assert measured.pop("rollout/tool_seconds_mean") >= 0
    assert measured == {
        "rollout/turns_mean": 3,
        "rollout/tool_calls_mean": 2,
        "rollout/tool_errors": 0.5,
        "rollout/tool_errors/unreadable": 0.5,
        **{f"rollout/tool_errors/{kind}": 0 for kind in ("unknown", "arguments", "raised", "timeout")},
    }


def test_the_files_show_the_calls_and_thoughts_of_a_single_reply():
    class Ends(Desk):
        async def step(self, reply):
            return None

    class Thoughts:
        def parse(self, ids, text, tools):
            return ParsedReply(message={"role": "assistant", "content": text, "reasoning": "hm"})

    called, _ = play(Policy(), env=Ends(PROMPT), tokenizer=Answered(), parser=Calls())
    [turn] = make_sample_record(called, 0)["turns"]
    assert turn["tool_calls"][0]["function"] == {"name": "look", "arguments": {"where": "here"}} and turn["tokens"] == 1
    thought, _ = play(Policy(), env=Ends(PROMPT), tokenizer=Answered(), parser=Thoughts())
    assert make_sample_record(thought, 0)["turns"][0]["reasoning"] == "hm"
    plain, _ = play(Policy(), env=Tool(PROMPT, "2"), max_turns=1)
    assert "turns" not in make_sample_record(plain, 0), "its completion says all of it"


def check_record(sample: Sample) -> None:
    record = make_sample_record(sample, 0)
    assert [turn.get("tokens") for turn in record["turns"]] == [1, None, 1, None, 1]
    assert record["turns"][0]["tool_calls"][0]["function"]["name"] == "look" and len(record["tools"]) == 7
    assert write_sample(0, record).splitlines()[1:] == [
        "  | user: 1 2",
        '  > assistant: look({"where": "here"})',
        "  | tool: nothing here",
        "  > assistant: 4",
        "  | tool: Error: there is no 4",
        "  > assistant: 5",
    ]


class Slow(Desk):
    """A tool that returns once AT_ONCE episodes are in it: with a lock anywhere, none would end."""

    inside = 0
    all_here = asyncio.Event()

    @tool
    async def look(self, where: str) -> str:
        """Look somewhere.

        Args:
            where: the place
        """
        Slow.inside += 1
        if Slow.inside == AT_ONCE:
            Slow.all_here.set()
        await Slow.all_here.wait()
        return "seen"


class SlowThreads(Desk):
    """The same for a function that is no coroutine: each call has a thread of its own."""

    here = threading.Barrier(AT_ONCE)

    @tool
    def look(self, where: str) -> str:
        """Look somewhere.

        Args:
            where: the place
        """
        SlowThreads.here.wait(60)
        return "seen"


@pytest.mark.parametrize("env", [Slow, SlowThreads])
def test_slow_tools_do_not_hold_up_other_episodes(env, monkeypatch):
    from rollouts.episode import run_episode
    from rollouts.turns import EpisodeRules

    env.tool_timeout_s = 60.0
    rules = EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=20, max_turns=2, timeout_s=60.0, parser=Calls())

    async def play_together() -> list[Any]:
        episodes = (run_episode(Policy(), env, PROMPT, Answered(), rules) for _ in range(AT_ONCE))
        return await asyncio.gather(*episodes)

    played = asyncio.run(play_together())
    assert [one.messages[1]["content"] for [one] in played] == ["seen"] * AT_ONCE


SLOW_DESK = """
import asyncio

from data_feeds.chat.tool_parsing import ParsedReply
from rollouts.tools.env import ToolEnv
from rollouts.tools.functions import tool


class SlowDesk(ToolEnv):
    inside, most, all_here = 0, 0, asyncio.Event()
    was_answered = False

    @tool
    async def look(self) -> str:
        \"\"\"Look.\"\"\"
        SlowDesk.inside += 1
        SlowDesk.most = max(SlowDesk.most, SlowDesk.inside)
        if SlowDesk.most == AT_ONCE:
            SlowDesk.all_here.set()
        await SlowDesk.all_here.wait()
        await asyncio.sleep(1)
        SlowDesk.inside -= 1
        return "seen"

    async def step(self, reply):
        if self.was_answered:
            return None
        self.was_answered = True
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
        return await super().step(ParsedReply(message={"role": "assistant", "content": "", "tool_calls": [call]}))

    def counts(self):
        return super().counts() | {"at_once": SlowDesk.most}
"""


@pytest.mark.verify
def test_the_episodes_of_a_step_on_ray_wait_for_slow_tools_together(trained, tmp_path):
    """A call returns a second after the last of all 64 has begun: if any two had to wait for each other, none would."""
    tiny_model.make(tmp_path / "tools", tools=True)
    (tmp_path / "slow_desk.py").write_text(SLOW_DESK.replace("AT_ONCE", str(AT_ONCE)))
    changes = {
        "backend": "ray",
        "model.path": str(tmp_path / "tools"),
        "steps": 1,
        "groups_per_step": 8,
        "group_size": AT_ONCE // 8,
        "data.max_prompt_tokens": 48,
        "rollout.env": str(tmp_path / "slow_desk.py"),
        "rollout.max_turns": 2,
        "rollout.max_new_tokens": 64,
        "rollout.stop_token_ids": list(range(7, 103)),  # so that a random model's replies end
    }
    run = trained(changes)
    [step] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert step["rollout/counts/at_once"] == AT_ONCE and step["rollout/tool_calls_mean"] == 1
    assert step["rollout/tool_errors"] == 0 and step["rollout/tool_seconds_mean"] >= 1
    assert step["time/engines/environment_s"] >= 1 and step["rollout/failed"] == 0


OLD = """
from rollouts.envs.base import Env
class Old(Env):
    async def step(self, reply: str):
        return None
"""


def test_an_environment_that_takes_text_is_told_what_it_gets(tmp_path):
    (tmp_path / "old.py").write_text(OLD)
    with pytest.raises(UserError, match=r"old.py: Old.step takes the reply as text, and it is given a ParsedReply"):
        load_env_class(resolve_env(str(tmp_path / "old.py")))


def test_tools_whose_results_are_never_seen_are_refused():
    assert list_env_tools(Desk, max_turns=2) == Desk.tools
    with pytest.raises(UserError, match=r"rollout.max_turns is 1, so the policy would never see what Desk answers"):
        list_env_tools(Desk, max_turns=1)
    with pytest.raises(UserError, match=r"rollout.env: Bad.tools: a tool has no name"):
        list_env_tools(type("Bad", (Env,), {"tools": [{"type": "function", "function": {}}]}), max_turns=1)
