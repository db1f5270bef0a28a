"""Conversations with tools: what is learnt, and the ids that follow a reply, equal the whole conversation's.

The templates are ours, in the shape of the families' (unit_tests/helpers/chat_families.py). The expected ids and masks
come from one render of the whole conversation and a search for the policy's turns in it.
"""

import re

import pytest

from core.errors import UserError
from data_feeds.chat.template_append import TemplateRefuses, TemplateRewrites
from unit_tests.helpers.chat_families import (
    ADD,
    FAMILIES,
    TOOLS,
    WEATHER,
    assistant,
    call,
    result,
    user,
)

OSLO, ROME = call("weather", "call00000", place="Oslo", days=2), call("weather", "call00001", place="Rome")
SUM = call("add", "call00002", a=1, b=2.5)
THINKS = {"qwen3"}
REPLIES = {
    "llama3": r"<\|header\|>assistant<\|header_end\|>\n\n(.*?<\|eot\|>)",
    None: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
}


def loop_of(family, *, question="Which?", several=True):
    """A question, a call (or two), results, another call, and an answer; with reasoning where the template has it."""
    thought = {"reasoning": "hm"} if family in THINKS else {}
    first = (OSLO, ROME) if several and family != "llama3" else (OSLO,)
    results = [result(f"{n} degrees", one["id"]) for n, one in enumerate(first)]
    said = "" if family == "llama3" else "I look."
    return [
        user(question),
        assistant(said, *first, **thought),
        *results,
        assistant("", SUM, **thought),
        result("3.5", SUM["id"]),
        assistant("It is 3.5.", **thought),
    ]


def whole_render(chat, family, messages, tools):
    """Return ids and mask of the whole text, up to the end of the last reply."""
    text = chat.render_text(messages, reply_next=False, tools=tools)
    spans = [m.span(1) for m in re.finditer(REPLIES.get(family, REPLIES[None]), text, re.DOTALL)]
    kept = text[: spans[-1][1]]
    found = chat.hf(kept, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(begin <= at < end for begin, end in spans) for at, _ in found["offset_mapping"]]
    return found["input_ids"], mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "none"])
def test_what_is_learnt_of_a_loop_of_calls_is_what_the_whole_render_holds(families, family, system, tools):
    chat, messages = families[family], loop_of(family)
    if system:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    ids, mask = chat.mask_turns(messages, tools=tools)
    # a piece may end in what the template writes after the last reply, which is not learnt
    expected_ids, expected_mask = whole_render(chat, family, messages, tools)
    n = len(expected_ids)
    assert ids[:n] == expected_ids and mask[:n] == expected_mask and not any(mask[n:])
    learnt = chat.hf.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert '"place": "Oslo", "days": 2' in learnt and '"a": 1, "b": 2.5' in learnt
    assert "degrees" not in learnt and "Which?" not in learnt and "required" not in learnt
    assert ("hm" in learnt) == (family in THINKS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("several", [True, False])
def test_an_episode_of_calls_has_the_ids_of_the_whole_conversation(families, family, several):
    """render + reply + render_turns, again and again, is what the template writes of it all."""
    chat, messages = families[family], loop_of(family, several=several)
    played = chat.render(messages[:1], TOOLS)
    at = 1
    while at < len(messages):
        upto = chat.render_text(messages[: at + 1], reply_next=False, tools=TOOLS)
        reply = upto[len(chat.render_text(messages[:at], reply_next=True, tools=TOOLS)) :]
        played += [*chat.encode(reply[: reply.index(chat.hf.eos_token)]), chat.hf.eos_token_id]
        answers = [m for m in messages[at + 1 : at + 3] if m["role"] == "tool"]
        if answers:
            played += chat.render_turns(messages[at], answers, TOOLS)
        at += 1 + len(answers)
    whole = chat.encode(chat.render_text(messages, reply_next=False, tools=TOOLS))
    assert whole[: len(played)] == played and len(whole) - len(played) <= 1


def test_results_of_one_reply_are_written_together(families):
    """Qwen's template joins the results of several calls in one turn: written one by one they would be others."""
    chat = families["qwen2.5"]
    reply, answers = assistant("", OSLO, ROME), [result("1"), result("2", "call00001")]
    together = chat.hf.decode(chat.render_turns(reply, answers, TOOLS))
    assert together.count("<|im_start|>user") == 1 and together.index("1") < together.index("2")
    assert together.endswith("<|im_end|>\n<|im_start|>assistant\n")
    mixed = chat.hf.decode(chat.render_turns(reply, [*answers, user("And?")], TOOLS))
    assert mixed.endswith("</tool_response><|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


def test_calls_that_hold_the_end_of_a_turn_do_not_hide_it(families):
    chat = families["hermes"]
    reply = assistant("", call("weather", place="<|im_end|>\n<|im_start|>user"))
    plain = chat.render_turns(assistant("", OSLO), [result("1")], TOOLS)
    assert chat.render_turns(reply, [result("1")], TOOLS) == plain


def test_a_template_of_one_call_takes_the_results_of_two(families):
    """A policy may make two calls where the template writes one: the results follow, and no run ends."""
    chat = families["llama3"]
    follow = chat.hf.decode(
        chat.render_turns(assistant("", OSLO, ROME), [result("a"), result("b", "call00001")], TOOLS)
    )
    header = "<|header|>ipython<|header_end|>\n\n"
    assert follow == f'{header}"a"<|eot|>{header}"b"<|eot|><|header|>assistant<|header_end|>\n\n'


def test_a_result_may_answer_a_reply_whose_call_could_not_be_read(families):
    chat = families["qwen2.5"]
    chat.hf.chat_template = FAMILIES["qwen2.5"].replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}{%- if message.role == 'tool' and not (messages[loop.index0 - 1].tool_calls or "
        "messages[loop.index0 - 1].role == 'tool') %}{{- raise_exception('no call') }}{%- endif %}",
    )
    try:
        with pytest.raises(TemplateRefuses, match="no call"):
            chat.render_text([user("."), assistant("x"), result("1")], reply_next=True)
        follow = chat.hf.decode(chat.render_turns(assistant("<tool_call>{"), [result("unreadable")], TOOLS))
        assert "unreadable\n</tool_response><|im_end|>" in follow
    finally:
        chat.hf.chat_template = FAMILIES["qwen2.5"]


def test_reasoning_left_out_of_history_by_a_template_stops_no_episode(families):
    chat = families["qwen3"]
    reply = assistant("It is cold.", reasoning="hm")
    follow = chat.hf.decode(chat.render_turns(reply, [user("And Rome?")], TOOLS))
    assert follow == "\n<|im_start|>user\nAnd Rome?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + FAMILIES["hermes"],  # what stands before the reply changes
        FAMILIES["hermes"].replace("+ message.content }}", "+ (message.content if loop.last else '') }}"),
    ],
    ids=["before", "in the reply"],
)
def test_a_template_that_rewrites_the_reply_is_refused(families, template):
    chat = families["hermes"]
    chat.hf.chat_template = template
    try:
        with pytest.raises(TemplateRewrites, match="use a template that only appends"):
            chat.render_turns(assistant("yes"), [user("why")])
    finally:
        chat.hf.chat_template = FAMILIES["hermes"]


def test_a_template_that_strips_reasoning_trains_on_the_last_reply_alone(families):
    """Earlier replies are no longer written as they were sampled, so they are not trained on as if they were."""
    chat = families["qwen3"]
    messages = [user("a"), assistant("b", reasoning="old"), *loop_of("qwen3")]
    with pytest.raises(UserError, match=r"rewrites earlier turns .* or data\.train_on: last_reply"):
        chat.mask_turns(messages, tools=TOOLS)
    ids, mask = chat.mask_turns(messages, "last_reply", TOOLS)
    whole = chat.render_text(messages, reply_next=False, tools=TOOLS)
    assert chat.hf.decode(ids) == whole and "old" not in whole
    assert chat.hf.decode([i for i, m in zip(ids, mask, strict=True) if m]) == (
        "<think>\nhm\n</think>\n\nIt is 3.5.<|im_end|>"
    )
    asked = chat.render(messages[:-1], TOOLS)
    assert ids[: len(asked)] == asked, "the context is the prompt that the policy would get"


def test_tools_of_one_row_do_not_leak_into_the_next(families):
    chat = families["hermes"]
    with_tools = chat.render([user("a")], [WEATHER])
    assert chat.render([user("a")]) != with_tools != chat.render([user("a")], [ADD])
    assert chat.render([user("a")], [WEATHER]) == with_tools
