"""Families of chat templates x kinds of conversations x ways to train: what each does, and the page that lists it.

What is expected comes from one render of the whole conversation, one call of the tokenizer, and a search for the
replies in the text. python -m unit_tests.helpers.family_matrix writes docs/chat_templates.md.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from configs.data_schema import RowDataConfig
from core.errors import UserError
from core.types.samples import Prompt, Sample
from data_feeds.chat.parsed_reply import ParsedReply
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups
from rollouts.engines.base import Completion
from rollouts.envs.base import Env
from rollouts.episode import run_episode
from rollouts.stops import Stops, check_stops
from rollouts.turns import EpisodeRules
from unit_tests.helpers.chat_families import ADD, WEATHER, assistant, call, result, user
from unit_tests.helpers.template_families import FAMILIES
from unit_tests.helpers.template_texts import Family

OSLO, SUM = call("weather", "call00000", place="Oslo", days=2), call("add", "call00001", a=1, b=2.5)
ONE = [user("What is 2 + 2 ?"), assistant("The answer is 4 .")]
TALKS: dict[str, list[Any]] = {
    "one turn": ONE,
    "several turns": [*ONE, user("And then?"), assistant("It is cold.\nIn Oslo é."), user("hm"), assistant("4")],
    "tools": [
        user("Which?"),
        assistant("", OSLO),
        result("It is cold.", "call00000"),
        assistant("", SUM),
        result("3.5", "call00001"),
        assistant("The answer is 3.5."),
    ],
    "thinking": [*ONE, user("And then?"), assistant("It is 5.", reasoning="hm hm")],
}
IN_CONTENT = {"r1-distill": "<think>\n", "deepseek 3.1": "<think>"}
"""Families whose thoughts are a part of the content, and what opens them in the header of a reply."""
NO_TOOLS = "leaves out the tools|no turn of tool, please"
NO_THOUGHTS = "the chat template leaves out reasoning"
TOOLS = {
    "qwen2.5",
    "qwen2.5 base",
    "qwen3",
    "qwen3 without thinking",
    "hermes",
    "smollm2",
    "llama3",
    "mistral 3",
    "glm-4",
}
THINKS = {"qwen3", "qwen3 without thinking", "gpt-oss", *IN_CONTENT}


def talk_of(name: str, kind: str) -> list[Any]:
    """Return the conversation as this family's rows hold it."""
    messages = TALKS[kind]
    if kind == "thinking" and name in IN_CONTENT:
        said = messages[-1]
        return [*messages[:-1], assistant(f"<think>\n{said['reasoning']}\n</think>\n\n{said['content']}")]
    return messages


def whole_text(name: str, chat: ChatTokenizer, messages: list[Any], tools: Any, *, sampled: bool = False) -> str:
    """Return the text of a conversation. sampled: as an episode has it, whose replies were written one by one."""
    family, said = FAMILIES[name], messages[-1]["content"]
    if "</think>" in said:  # what the template deletes, and what the policy says after the header
        asked = chat.render_text(messages[:-1], reply_next=True, tools=tools)
        text = asked + said.removeprefix(IN_CONTENT[name]) + family.eos
    else:
        text = chat.render_text(messages, reply_next=False, tools=tools)
        if family.appended:
            text = text[: family.find_replies(text)[-1][1]] + family.appended
    if sampled and family.header[0]:
        text = text.replace(family.header[1], family.header[0]).replace(*family.header)
    return text.replace(*family.sampled_end) if sampled and family.sampled_end[0] else text


def encode(family: Family, chat: ChatTokenizer, text: str) -> tuple[list[int], list[list[int]]]:
    """Return ids of a text, and the positions of every reply's tokens."""
    found = chat.hf(text, add_special_tokens=False, return_offsets_mapping=True)
    appended = len(family.appended)
    spans = [(a, b + (b + appended == len(text)) * appended) for a, b in family.find_replies(text)]
    inside = [[i for i, (begin, _) in enumerate(found["offset_mapping"]) if a <= begin < b] for a, b in spans]
    return found["input_ids"], inside


def check(
    what: str, found: tuple[list[int], list[bool]], expected: tuple[list[int], list[list[int]]], chat: Any
) -> str:
    """Return a difference, or ""."""
    (ids, mask), (whole, replies) = found, expected
    show = chat.hf.convert_ids_to_tokens
    if what == "episode":  # it ends with the last reply
        whole = whole[: replies[-1][-1] + 1]
    if ids != whole:
        at = next((i for i in range(len(whole)) if ids[i : i + 1] != whole[i : i + 1]), len(whole))
        return f"{what}: token {at} is {show(ids[at : at + 4])}, and in the whole text {show(whole[at : at + 4])}"
    learnt = [i for i, is_learnt in enumerate(mask) if is_learnt]
    if learnt != sorted(i for reply in replies for i in reply):
        return (
            f"{what}: learnt is {show([ids[i] for i in learnt])}, said {[show([whole[i] for i in r]) for r in replies]}"
        )
    return ""


class Given:
    """Engine, environment and parser in one, that play a given conversation."""

    def __init__(self, replies: list[list[int]], messages: list[Any]):
        self.replies, self.left = list(replies), messages[1:]

    async def generate(self, token_ids: list[int], *, max_new_tokens: int, seed: int, **images: Any) -> Completion:
        ids = self.replies.pop(0)
        return Completion(token_ids=ids, logp=[-0.5] * len(ids), versions=[0] * len(ids), stop="eos")

    def parse(self, ids: list[int], text: str, tools: Any) -> ParsedReply:
        return ParsedReply(message=self.left.pop(0))

    def make_env(self, prompt: Prompt) -> Env:
        given = self

        class Player(Env):
            async def step(self, reply: ParsedReply) -> list[Any] | None:
                n = next((n for n, m in enumerate(given.left) if m["role"] == "assistant"), 0)
                answers, given.left = given.left[:n], given.left[n:]
                return answers or None

        return Player(prompt)


def play(chat: ChatTokenizer, messages: list[Any], replies: list[list[int]], tools: Any) -> Sample:
    given: Any = Given(replies, messages)
    check_stops(chat, [], [], chat.vocabulary)
    rules = EpisodeRules(
        seed_of_turn=lambda turn: 0,
        max_new_tokens=10_000,
        max_turns=9,
        timeout_s=9.0,
        stops=Stops(chat, [], []),
        parser=given,
    )
    prompt = Prompt(id="p", messages=messages[:1], tools=tools or [])
    [played] = asyncio.run(run_episode(given, given.make_env, prompt, chat, rules))
    assert not played.sample.failure, played.sample.failure
    return played.sample


def rows_of(sample: Sample) -> tuple[list[int], list[bool]]:
    return sample.token_ids.tolist(), sample.action_mask.tolist()


def train(chat: ChatTokenizer, row: dict[str, Any], rows: Any, train_on: Any, folder: Path) -> list[Sample]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row))
    data = RowDataConfig(train=str(file), train_on=train_on, max_tokens=4000)
    return load_groups(data, "train", chat, rows=rows, seed=0).all()[0]


def try_all(name: str, chat: ChatTokenizer, kind: str, folder: Path) -> dict[str, str]:
    """Return for each way of training what went wrong, or ""."""
    family, messages = FAMILIES[name], talk_of(name, kind)
    tools = [WEATHER, ADD] if kind == "tools" else []
    row = {"messages": messages, "tools": json.dumps(tools)} if tools else {"messages": messages}
    other = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + " hm"}]
    outcomes: dict[str, str] = {}

    def attempt(way: str, of: Any) -> None:
        try:
            outcomes[way] = of()
        except UserError as refusal:
            outcomes[way] = f"refused: {refusal}"

    def expect(talk: list[Any]) -> tuple[list[int], list[list[int]]]:
        return encode(family, chat, whole_text(name, chat, talk, tools))

    def supervised(train_on: Any) -> str:
        [sample] = train(chat, row, "conversations", train_on, folder)
        ids, replies = expect(messages)
        return check("sft", rows_of(sample), (ids, replies[-1:] if train_on == "last_reply" else replies), chat)

    def pairs() -> str:
        both = {"chosen": messages, "rejected": other} | ({"tools": row["tools"]} if tools else {})
        wrong = []
        for sample, talk in zip(train(chat, both, "pairs", ["assistant"], folder), (messages, other), strict=True):
            ids, replies = expect(talk)
            wrong.append(check("pair", rows_of(sample), (ids, replies[-1:]), chat))
        return next(filter(None, wrong), "")

    def episode() -> str:
        ids, replies = encode(family, chat, whole_text(name, chat, messages, tools, sampled=True))
        said = [[ids[i] for i in reply] for reply in replies]
        return check("episode", rows_of(play(chat, messages, said, tools)), (ids, replies), chat)

    attempt("sft", lambda: supervised(["assistant"]))
    attempt("last reply", lambda: supervised("last_reply"))
    attempt("pairs", pairs)
    attempt("episode", episode)
    return outcomes


def expected_refusal(name: str, kind: str, way: str) -> str:
    """Return the expression of the sentence that refuses a family, or ""."""
    if way == "episode":  # thoughts are sampled, and no template leaves them out
        letters = f"{NO_TOOLS}|ends a turn with <.im_end.>, which is no token of this model's tokenizer"
        no_tools = kind == "tools" and name not in TOOLS and name != "olmo 2"
        return letters if name == "chatml in plain letters" else NO_TOOLS if no_tools else ""
    if kind == "tools" and name not in TOOLS:
        return NO_TOOLS
    return NO_THOUGHTS if kind == "thinking" and name not in THINKS else ""


def try_every_family(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the outcomes of every family and kind of conversation."""
    outcomes: dict[tuple[str, str], dict[str, str]] = {}
    for n, (name, family) in enumerate(FAMILIES.items()):
        (folder / str(n)).mkdir()
        chat = family.load(folder / str(n))
        outcomes |= {(name, kind): try_all(name, chat, kind, folder) for kind in TALKS}
        outcomes[name, "end"] = {"end": chat.end.text}
    return outcomes


PAGE = """# Families of chat templates

<!-- made by `python -m unit_tests.helpers.family_matrix`; a test compares it with the code -->

Chat templates of our own that behave as those of {n} families do, each with a tokenizer of the family's kind. **yes**:
rows, last replies, pairs and episodes were made, and their tokens and masks are those of the whole conversation,
rendered and encoded once. A number: they are refused, with the sentence below, but for what is said to train.

The end of a reply is what the template writes after one, found by rendering. The engine stops at it, supervised rows
are trained up to it, and episodes go on after it. `--explain` shows it, and `data.end_of_turn` names another. GLM-4
ends a reply only by the header of the next turn, and Falcon by nothing: there the end is added to the last reply.

`data.chat_template` puts a template in place of the model's. Thoughts are `reasoning` of a message where the template
reads that, and else a part of the content, such as `<think>...</think>`. What a template leaves out of earlier replies
is not trained: set `data.train_on: last_reply`. An episode keeps every token that was sampled.

**Channels.** gpt-oss writes a reply in messages: thoughts in the channel `analysis`, what the user reads in `final` (or
in `commentary`, before a call), and a call to `functions.NAME` up to `<|call|>`. Rewards, environments and agents get
the content; thoughts are `reasoning` of the message, and every sampled token is trained. Without a parser a reward
would read `analysisTwo and two.assistantfinal4`, so replies are read by channels if the chat template begins them so.
`<|call|>` must be in `eos_token_id` of the model's `generation_config.json`, as it is in OpenAI's.

| family | tokenizer | end of a reply | one turn | several turns | tools | thinking |
|---|---|---|---|---|---|---|
{rows}

{notes}
"""
BAR = "\\|"
"""Written form of a bar in a cell of a table."""
KINDS = {
    "bytes": "byte-level BPE",
    "always": "Metaspace, always",
    "first": "Metaspace, first",
    "never": "spaces replaced, none prepended",
    "legacy": "space prepended by the normalizer",
}


def write_page(outcomes: dict[tuple[str, str], dict[str, str]]) -> str:
    """Return docs/chat_templates.md."""
    notes: list[str] = []

    def cell(name: str, kind: str) -> str:
        ways = outcomes[name, kind]
        told = list(
            dict.fromkeys(
                re.sub(r"^refused: (.*row 0: )?(the chat template refuses it: )?", "", text).rstrip(")")
                for text in ways.values()
                if text
            )
        )
        notes.extend(text for text in told if text not in notes)
        numbers = ", ".join(str(notes.index(text) + 1) for text in told)
        if not told:
            return "yes"
        trained = [
            {"sft": "rows", "pairs": "pairs", "episode": "episodes"}.get(way) for way, text in ways.items() if not text
        ]
        return " ".join([numbers, *([f"*({', '.join(filter(None, trained))}: yes)*"] if trained else [])])

    rows = [
        f"| {name} | {KINDS[family.kind]} | `{outcomes[name, 'end']['end'].replace('|', BAR)}` | "
        + " | ".join(cell(name, kind) for kind in TALKS)
        + " |"
        for name, family in FAMILIES.items()
    ]
    told = [f"{n}. `{note}`" for n, note in enumerate(notes, 1)]
    return PAGE.format(n=len(FAMILIES), rows="\n".join(rows), notes="\n".join(told))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        (Path(__file__).parents[2] / "docs" / "chat_templates.md").write_text(write_page(try_every_family(Path(made))))
