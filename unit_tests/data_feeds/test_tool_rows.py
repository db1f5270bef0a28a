"""Rows with tools: their forms, what is invalid, and what a template would leave out, which is refused."""

import json
import shutil
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_groups, load_prompts
from data_prep import tiny_model
from unit_tests.helpers.chat_families import ADD, FAMILIES, TOOLS, WEATHER, assistant, call, result, user

OSLO = call("weather", "a", place="Oslo")
ROME = call("weather", "b", place="Rome")
TALK = [user("Which?"), assistant("", OSLO), result("3", "a"), assistant("3 degrees.")]


@pytest.fixture(scope="module")
def plain(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "plain")


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def conversations(chat, tmp_path, rows, *, kind="conversations", **settings):
    settings = {"max_tokens": 2000, "max_invalid_fraction": 1.0} | settings
    data = RowDataConfig(train=write(tmp_path / "x.jsonl", rows), **settings)
    return load_groups(data, "train", chat, rows=kind, seed=0)


def prompts(chat, path, **settings):
    settings = {"max_prompt_tokens": 2000, "max_invalid_fraction": 1.0} | settings
    return load_prompts(PromptDataConfig(train=str(path), **settings), "train", chat, seed=0)


def why(feed) -> dict[str, str]:
    return {reason: case.why for reason, case in feed.sources[0].invalid.cases.items()}


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_are_those_of_its_prompt(families, tmp_path, as_text):
    tools: Any = json.dumps(TOOLS) if as_text else TOOLS
    path = write(tmp_path / "x.jsonl", [{"messages": "Which?", "tools": tools}, {"messages": "Hi."}])
    with_tools, without = prompts(families["qwen2.5"], path).all()
    assert with_tools.tools == TOOLS and without.tools == [] and "tools" not in with_tools.extra
    text = families["qwen2.5"].hf.decode(families["qwen2.5"].render(with_tools.messages, with_tools.tools))
    assert json.dumps(WEATHER) in text


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tools_as_text_come_from_every_kind_of_file(families, tmp_path, form):
    from datasets import Dataset

    rows = Dataset.from_list([{"messages": "Which?", "tools": json.dumps(TOOLS)}, {"messages": "Hi.", "tools": None}])
    path = tmp_path / f"x.{form}"
    rows.to_csv(path) if form == "csv" else rows.to_parquet(path)
    assert [p.tools for p in prompts(families["hermes"], path).all()] == [TOOLS, []]


def changed(tool, **function) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], **function}}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("[{", "tools is text and no JSON"),
        ({"weather": WEATHER}, "tools must be a list of {type: function"),
        ([WEATHER["function"]], "a tool must be {type: function"),
        ([changed(WEATHER, name=" ")], "a tool has no name"),
        ([changed(WEATHER, description=3)], "the description of the tool weather must be text"),
        ([changed(WEATHER, parameters=None)], "must be a JSON schema of the type object, found None"),
        ([changed(WEATHER, parameters={"type": "string"})], "must be a JSON schema of the type object"),
        (
            [changed(WEATHER, parameters={"type": "object", "properties": {"place": {"type": "str"}}})],
            "parameters of the tool weather are no JSON schema: 'str' is not valid",
        ),
        ([WEATHER, ADD, WEATHER], "two tools are called 'weather'"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_no_tool_makes_its_row_invalid(families, tmp_path, tools, words):
    path = write(tmp_path / "x.jsonl", [{"messages": "Which?", "tools": tools}, {"messages": "Hi.", "tools": TOOLS}])
    feed = prompts(families["hermes"], path)
    assert [p.id for p in feed.all()] == ["1"]
    assert [*why(feed)] == ["bad_tools"] and words in why(feed)["bad_tools"]


def spoken(chat, sample) -> str:
    return chat.hf.decode([t for t, m in zip(sample.token_ids.tolist(), sample.action_mask, strict=True) if m])


FORMS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [OSLO]},
    {"role": "assistant", "content": "", "tool_calls": [OSLO], "refusal": None, "name": None},
    {
        "role": "assistant",
        "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}],
    },
    {"role": "assistant", "content": [], "tool_calls": [{**OSLO, "type": "function"}]},
]


@pytest.mark.parametrize("turn", FORMS, ids=["null", "empty", "text arguments", "no parts"])
def test_a_call_is_the_same_however_it_is_written(families, tmp_path, turn):
    chat = families["hermes"]
    [[sample]] = conversations(chat, tmp_path, [{"messages": [TALK[0], turn, *TALK[2:]], "tools": TOOLS}]).all()
    assert sample.prompt.messages[1] == assistant("", OSLO) and sample.prompt.tools == TOOLS
    assert spoken(chat, sample) == (
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call><|im_end|>3 degrees.<|im_end|>'
    )


@pytest.mark.parametrize("spelled", ["reasoning", "reasoning_content"])
def test_reasoning_is_learnt_under_both_of_its_names(families, tmp_path, spelled):
    turn = {"role": "assistant", "content": "3.", spelled: "hm"}
    [[sample]] = conversations(families["qwen3"], tmp_path, [{"messages": [user("1+2"), turn]}]).all()
    assert sample.prompt.messages[1] == {"role": "assistant", "content": "3.", "reasoning": "hm"}
    assert spoken(families["qwen3"], sample) == "<think>\nhm\n</think>\n\n3.<|im_end|>"


def test_parts_of_text_are_one_text_and_other_parts_are_refused(families, tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+2?", "image": None}]
    path = write(tmp_path / "x.jsonl", [{"messages": [{"role": "user", "content": parts}]}])
    [prompt] = prompts(families["hermes"], path).all()
    assert prompt.messages == [user("What is 1+2?")]
    video = [*parts, {"type": "video", "video": "x.mp4"}]
    path = write(tmp_path / "x.jsonl", [{"messages": [{"role": "user", "content": video}]}])
    with pytest.raises(UserError, match=r"row 0: a message holds a part of the type video, and only text and images"):
        prompts(families["hermes"], path)


BAD_CALLS = [
    ({**OSLO, "function": {"name": "weather", "arguments": "Oslo"}}, "must be a JSON object, found 'Oslo'"),
    ({**OSLO, "function": {"name": "weather", "arguments": '["Oslo"]'}}, "must be a JSON object"),
    ({**OSLO, "function": {"name": "weather", "arguments": None}}, "must be a JSON object, found None"),
    ({"name": "weather", "arguments": {}}, "a call must be {id, type, function: {name, arguments}}"),
    ({**OSLO, "type": "custom"}, "a call has the type 'custom'"),
    ({**OSLO, "id": 3}, "id of a call must be text"),
    (call("fly", "a"), "it calls fly, which is none of its tools"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_CALLS, ids=[words for _, words in BAD_CALLS])
def test_a_call_that_is_none_makes_its_row_invalid(families, tmp_path, bad, words):
    rows = [{"messages": messages, "tools": TOOLS} for messages in ([TALK[0], assistant("", bad), *TALK[2:]], TALK)]
    feed = conversations(families["hermes"], tmp_path, rows)
    assert len(feed.all()) == 1 and [*why(feed)] == ["bad_messages"] and words in why(feed)["bad_messages"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("a"), {"role": "user", "content": "b", "tool_calls": [OSLO]}, assistant("c")], "belongs to a turn of"),
        ([user("a"), {"role": "user", "content": "b", "reasoning": "x"}, assistant("c")], "belongs to a turn of"),
        ([user("a"), assistant("", OSLO), result("1", "z"), assistant("c")], "answers the call 'z'"),
        ([user("a"), assistant("", OSLO, OSLO), assistant("c")], "two calls of one reply have the same id"),
        ([user("a"), {"role": "assistant", "content": None}], "must be text or a list of {role, content}"),
        ([user("a"), {"role": "assistant", "content": "b", "name": 5}], "name of a message must be text"),
        (
            [user("a"), {"role": "assistant", "content": "b", "reasoning": "x", "reasoning_content": "y"}],
            "has reasoning and reasoning_content, and they differ",
        ),
    ],
)
def test_fields_at_the_wrong_place_make_their_row_invalid(families, tmp_path, messages, words):
    feed = conversations(
        families["qwen3"], tmp_path, [{"messages": messages}, {"messages": [user("a"), assistant("b")]}]
    )
    assert len(feed.all()) == 1 and words in why(feed)["bad_messages"]


def test_a_file_that_fills_in_nulls_wants_text(families, tmp_path):
    """Parquet gives every object of a column the keys of all: a tool without `days` would get `days: null`."""
    from datasets import Dataset

    calls = [assistant("", OSLO), assistant("", call("add", "a", a=1, b=2))]
    rows = [{"messages": [user("a"), turn], "tools": [tool]} for turn, tool in zip(calls, TOOLS, strict=True)]
    as_text = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    for name, form in (("objects", rows), ("calls", as_text)):
        Dataset.from_list(form).to_parquet(tmp_path / f"{name}.parquet")
        data = RowDataConfig(train=str(tmp_path / f"{name}.parquet"), max_tokens=2000, max_invalid_fraction=1.0)
        with pytest.raises(UserError, match=r"hold null, and this kind of file writes null .* as JSON text"):
            load_groups(data, "train", families["hermes"], rows="conversations", seed=0)
    for row in as_text:
        turn = row["messages"][1]
        function = turn["tool_calls"][0]["function"]
        row["messages"][1] = assistant(
            "", {**OSLO, "function": {**function, "arguments": json.dumps(function["arguments"])}}
        )
    Dataset.from_list(as_text).to_parquet(tmp_path / "text.parquet")
    data = RowDataConfig(train=str(tmp_path / "text.parquet"), max_tokens=2000)
    groups = load_groups(data, "train", families["hermes"], rows="conversations", seed=0).all()
    assert [sample.prompt.messages[1] for [sample] in groups] == calls


def test_pairs_are_compared_by_what_they_call(families, tmp_path):
    chat = families["hermes"]
    rows = [
        {"messages": "Which?", "tools": TOOLS, "chosen": [assistant("", OSLO)], "rejected": [assistant("", ROME)]},
        {"messages": "Which?", "tools": TOOLS, "chosen": [assistant("", OSLO)], "rejected": "I do not know."},
        {"messages": "Which?", "chosen": [assistant("", OSLO)], "rejected": [assistant("", {**OSLO, "id": "other"})]},
    ]
    feed = conversations(chat, tmp_path, rows, kind="pairs")
    (oslo, rome), (_, text) = feed.all()
    assert '"Oslo"' in spoken(chat, oslo) and '"Rome"' in spoken(chat, rome) and "know" in spoken(chat, text)
    assert why(feed) == {"same_reply": "chosen and rejected are the same"}


# what a template would leave out


def test_tools_that_the_template_does_not_write_are_refused(tiny_path, plain, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"messages": "Hi."}, {"messages": "Which?", "tools": TOOLS}])
    with pytest.raises(UserError, match=r"row 1: the chat template leaves out the tools: .* remove the column"):
        prompts(ChatTokenizer(tiny_path, "chat"), path)
    with pytest.raises(UserError, match=r"row 1: data\.template=plain leaves out the tools: use data\.templ"):
        prompts(plain, path)


LEFT_OUT = [
    ("tiny", TALK, r"row 0: the chat template leaves out tool_calls: "),
    ("tiny", [user("a"), assistant("b", reasoning="hm")], "leaves out reasoning: .* write it into the content"),
    ("qwen2.5", [user("a"), assistant("b", reasoning="hm")], "leaves out reasoning"),
    ("qwen2.5", [{**user("a"), "name": "Ann"}, assistant("b")], "leaves out the name of a message"),
    (
        "llama3",
        [user("a"), assistant("I look.", OSLO), *TALK[2:]],
        "leaves out the content of a turn that has tool_calls",
    ),
    (
        "hermes",
        [user("a"), assistant("", OSLO, ROME), result("1", "b"), result("2", "a"), assistant("c")],
        "leaves out tool_call_id: .* bring results into the order of their calls",
    ),
]


@pytest.mark.parametrize(("family", "messages", "words"), LEFT_OUT, ids=[words[:40] for _, _, words in LEFT_OUT])
def test_a_field_that_the_template_does_not_write_is_refused(families, tiny_path, tmp_path, family, messages, words):
    chat = ChatTokenizer(tiny_path, "chat") if family == "tiny" else families[family]
    with pytest.raises(UserError, match=words):
        conversations(chat, tmp_path, [{"messages": messages}])
    prompt = messages if messages[-1]["role"] != "assistant" else [*messages, user("And?")]
    with pytest.raises(UserError, match=words):
        prompts(chat, write(tmp_path / "y.jsonl", [{"messages": prompt}]))


def test_a_template_that_writes_the_first_call_alone_is_refused(families, tmp_path):
    chat = families["hermes"]
    chat.hf.chat_template = FAMILIES["hermes"].replace(
        "for call in message.tool_calls or []", "for call in (message.tool_calls or [])[:1]"
    )
    try:
        with pytest.raises(UserError, match="leaves out call 2 of 2 of one reply"):
            conversations(chat, tmp_path, [{"messages": TALK}, {"messages": [user("a"), assistant("", OSLO, ROME)]}])
    finally:
        chat.hf.chat_template = FAMILIES["hermes"]


def test_what_a_template_refuses_is_an_invalid_row(families, tmp_path):
    two = [user("a"), assistant("", OSLO, ROME)]
    feed = conversations(families["llama3"], tmp_path, [{"messages": TALK, "tools": TOOLS}, {"messages": two}])
    assert len(feed.all()) == 1 and "one call at once" in why(feed)["bad_messages"]


def test_what_loses_nothing_is_accepted(families, tmp_path):
    """Ids in the order of the calls, and the name of the function that was called, say nothing more."""
    named = {**result("3", "a"), "name": "weather"}
    for family in ("qwen2.5", "hermes", "llama3"):
        assert len(conversations(families[family], tmp_path, [{"messages": [*TALK[:2], named, TALK[3]]}]).all()) == 1
    thought = [user("a"), assistant("b", reasoning="old"), user("c")]
    [prompt] = prompts(families["qwen3"], write(tmp_path / "y.jsonl", [{"messages": thought}])).all()
    assert "old" not in families["qwen3"].render_text(prompt.messages, reply_next=True), "the template's own rule"


def test_a_row_of_tools_as_long_as_a_book_is_refused_before_tokenization(families, tmp_path):
    long = changed(WEATHER, description="x" * 1_000_000)
    path = write(tmp_path / "x.jsonl", [{"messages": "Which?", "tools": [long]}])
    with pytest.raises(UserError, match=r"1 too_long .* 21 tokens and more"):
        prompts(families["hermes"], path, max_prompt_tokens=20)


def test_prompts_with_tools_and_no_parser_end_the_run_before_it_starts(refused, tmp_path, tiny_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_path, model)
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    (model / "chat_template.jinja").write_text(names + tiny_model.CHAT_TEMPLATE, encoding="utf-8")
    rows = write(tmp_path / "x.jsonl", [{"messages": "1+1=", "answer": "2", "tools": TOOLS}])
    changes = {"data.train": rows, "model.path": str(model)}
    refused(changes, "rollout.tool_parser is unset, there are tools", "hermes, llama3_json")
    refused(changes | {"rollout.tool_parser": "hermis"}, "rollout.tool_parser=hermis is no parser")
