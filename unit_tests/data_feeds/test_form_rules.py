"""Rows of a form, one by one: the settings that they need, and turns that hold columns of another form."""

from __future__ import annotations

from typing import Any

import pytest

from data_feeds.rows.convert_form import convert_row
from data_feeds.rows.find_form import find_form
from data_feeds.rows.form_settings import check_form_settings
from data_feeds.rows.sources import Record, Records
from unit_tests.helpers.chat_families import assistant, user
from unit_tests.helpers.sentences import tell

TALK = [user("q"), assistant("a")]
TURNS, WORDS = '[{"role": "user", "content": "q"}]', "all of it"
EVERYTHING = "data.template: plain and data.train_on: everything"
NO_TEMPLATE = {
    "segments": "k is of form segments, which no chat template writes: set data.template: plain",
    "text": f"k is of form text, which no chat template writes: set {EVERYTHING}",
}
AS_USER = (
    "k: messages is plain text, which the chat template would write as the turn of a user: set "
    f"{EVERYTHING} to train on it as it is, or name the column of the replies, too (columns: {{completion: ...}})"
)
ROWS = {"ours": {"messages": TALK}, "segments": {"segments": [{"label": True, "text": "x"}]}, "text": {"text": "x"}}
SETTINGS: list[tuple[str, list[Any], str, Any, str]] = [
    # the form, the messages of its rows, template and train_on, and what is said
    ("segments", [], "plain", ["assistant"], ""),
    ("segments", [], "chat", ["assistant"], NO_TEMPLATE["segments"]),
    ("text", [WORDS], "plain", "everything", ""),
    ("text", [WORDS], "chat", "everything", NO_TEMPLATE["text"]),
    ("text", [WORDS], "plain", "last_reply", NO_TEMPLATE["text"]),
    ("ours", [TALK], "chat", ["assistant"], ""),
    ("ours", [WORDS], "chat", ["assistant"], AS_USER),
    ("ours", [WORDS], "chat", "everything", AS_USER),
    ("ours", [WORDS, None], "chat", "last_reply", AS_USER),
    ("ours", [WORDS], "chat", ["assistant", "user"], ""),
    ("ours", [WORDS], "plain", "everything", ""),
    # one row of turns is enough for a mistake in the others to be an invalid row
    ("ours", [WORDS, TURNS], "chat", ["assistant"], ""),
    ("ours", [WORDS, TALK], "chat", ["assistant"], ""),
    ("ours", ["", None], "chat", ["assistant"], ""),
]


@pytest.mark.parametrize(("form", "messages", "template", "train_on", "sentence"), SETTINGS)
def test_a_form_is_read_with_the_settings_that_it_needs(form, messages, template, train_on, sentence):
    fit = find_form("conversations", [ROWS[form]], key="k", path="x")
    assert fit.name == form
    items = [Record(id="r", where="k", columns={"messages": one}, extra={}) for one in messages]
    read = Records(items=items, fit=fit, notes=[])

    def check() -> None:
        check_form_settings(read, key="k", template=template, train_on=train_on)

    if sentence:
        assert tell(check) == sentence
    else:
        check()


OTHER_FORMS: dict[str, dict[str, Any]] = {
    # columns of turns of another form, which a turn with a speaker only has beside its words
    "pair": {"user": "x", "assistant": "y"},
    "question and answer": {"question": "x", "answer": "y"},
    "segment": {"label": True, "text": "x"},
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_turn_with_a_speaker_is_one_turn_whatever_else_it_holds(name):
    more = OTHER_FORMS[name]
    human, gpt = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
    for turns in ([human | more, gpt], [user("q") | more, assistant("a")]):
        row = {"conversations": turns}
        made = convert_row(find_form("conversations", [row], key="k", path="x"), row)
        assert made["messages"] == [user("q") | more, assistant("a")]
    if name != "segment":
        row = {"conversations": [more]}
        made = convert_row(find_form("conversations", [row], key="k", path="x"), row)
        assert made["messages"] == [user("x"), assistant("y")]
    row = {"segments": [{"label": False, "text": "x"}, {"label": True, "text": "y"}]}
    made = convert_row(find_form("conversations", [row], key="k", path="x"), row)
    assert made["messages"] == [user("x") | {"train": False}, user("y") | {"train": True}]
