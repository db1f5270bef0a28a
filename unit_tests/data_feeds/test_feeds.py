"""Rows to prompts and samples: nothing is dropped in silence, and what is learnt is what will be sampled."""

import json
from itertools import groupby
from typing import Any

import pytest

from configs.data_schema import PromptDataConfig, RowDataConfig
from core.errors import UserError
from core.types.samples import Group
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, load_groups, load_prompts
from unit_tests.helpers.chat_families import assistant, user


@pytest.fixture(scope="module")
def chat(tiny_path) -> ChatTokenizer:
    return ChatTokenizer(tiny_path, "chat")


def jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def data_of(train, **settings) -> PromptDataConfig:
    return PromptDataConfig(train=train, **{"max_prompt_tokens": 20, "max_invalid_fraction": 1.0} | settings)


def rows_of(train, **settings) -> RowDataConfig:
    return RowDataConfig(train=train, **{"max_tokens": 20, "max_invalid_fraction": 1.0} | settings)


def groups_of(chat, tmp_path, rows, *, kind, **settings) -> Feed[Group]:
    data = rows_of(jsonl(tmp_path / "x.jsonl", rows), **settings)
    return load_groups(data, "train", chat, rows=kind, seed=0)


def unfit_of(feed) -> dict[str, tuple[int, str]]:
    return {reason: (case.rows, case.example) for reason, case in feed.sources[0].invalid.cases.items()}


def spoken(chat, sample) -> str:
    """The learnt tokens as they are, a bar where something is left out."""
    tokens = zip(chat.hf.convert_ids_to_tokens(sample.token_ids), sample.action_mask, strict=True)
    runs = groupby(tokens, key=lambda token: token[1])
    return "|".join("".join(text for text, _ in run) for learnt, run in runs if learnt)


def test_too_long_prompts_are_left_out_and_counted(chat, tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"id": "long", "messages": [user("1" * 30)]}, {"messages": [user("1+1=")]}])
    feed = load_prompts(data_of(path), "train", chat, seed=0)
    assert [p.id for p in feed.all()] == ["1"]
    assert unfit_of(feed) == {"too_long": (1, "long")}
    [sentence], facts = feed.summary("data.train")
    assert "1 rows are used and 1 are invalid: 1 too_long (such as row long: 32 tokens" in sentence
    assert facts["x"]["used"] == 1 and facts["x"]["invalid"]["too_long"]["rows"] == 1


def test_more_unfit_rows_than_the_share_allows_stop_the_run(chat, tmp_path):
    rows = [{"messages": [user("1" * 30)]}, {"messages": []}, *[{"messages": [user(f"{i}+1=")]} for i in range(8)]]
    path = jsonl(tmp_path / "x.jsonl", rows)
    feed = load_prompts(data_of(path, max_invalid_fraction=0.2), "train", chat, seed=0)
    assert len(feed.all()) == 8
    with pytest.raises(
        UserError, match=r"2 of 10 rows are invalid.*max_invalid_fraction=0.19: 1 too_long .*1 bad_messages"
    ):
        load_prompts(data_of(path, max_invalid_fraction=0.19), "train", chat, seed=0)


def test_held_out_rows_are_limited_and_those_beyond_are_not_looked_at(chat, tmp_path):
    rows = [{"messages": [user("1" * 30)]}, *[{"messages": [user(f"{i}+1=")]} for i in range(8)]]
    data = data_of("unused.jsonl", eval=jsonl(tmp_path / "x.jsonl", rows), eval_rows=3)
    feed = load_prompts(data, "eval", chat, seed=0)
    assert [p.id for p in feed.all()] == ["1", "2", "3"]
    assert feed.sources[0].invalid.looked_at == 4


def test_a_feed_draws_every_row_once_per_pass_in_an_order_of_its_own(chat, tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"id": i, "messages": [user(f"{i}+1=")], "answer": i + 1} for i in range(9)])
    feed = load_prompts(data_of(path), "train", chat, seed=0)
    passes = [[feed.draw(t).id for t in range(n * 9, n * 9 + 9)] for n in range(3)]
    assert all(sorted(p) == sorted(map(str, range(9))) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    other = load_prompts(data_of(path), "train", chat, seed=1)
    assert passes[0] != [other.draw(t).id for t in range(9)]
    assert feed.draw(3) == feed.draw(3), "a function of the ticket alone"
    assert feed.all()[4].answer == "5"


def test_the_order_of_a_single_data_set_is_the_one_that_recorded_runs_had(chat, tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": [user(f"{i}+1=")]} for i in range(9)])
    feed = load_prompts(data_of([{"path": path}]), "train", chat, seed=0)
    assert [int(feed.draw(t).id) for t in range(20)] == [0, 1, 2, 4, 6, 3, 8, 7, 5, 1, 4, 3, 5, 8, 0, 2, 6, 7, 4, 2]


def test_what_is_learnt_is_what_the_policy_would_say(chat):
    conversation = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    ids, mask = chat.mask_turns(conversation)
    spoken = [i for i, m in zip(ids, mask, strict=True) if m]
    assert spoken == [*chat.encode("2"), chat.hf.eos_token_id, *chat.encode("4"), chat.hf.eos_token_id]
    first = chat.render(conversation[:1])
    assert ids[: len(first)] == first, "the prompt of training is the prompt of sampling"
    assert not any(mask[: len(first)])


def test_what_a_reward_reads_has_no_special_tokens(chat):
    assert chat.decode([*chat.encode("42"), chat.hf.eos_token_id]) == "42"


def test_a_row_may_be_as_long_as_the_recipe_says(chat, tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"messages": [user("1" * n)]} for n in (18, 19)])
    feed = load_prompts(data_of(path), "train", chat, seed=0)  # two tokens more are the roles'
    assert [p.id for p in feed.all()] == ["0"] and unfit_of(feed) == {"too_long": (1, "1")}


def test_the_sources_of_a_mixture_are_shuffled_apart(chat, tmp_path):
    rows = [{"messages": [user(f"{i}+1=")]} for i in range(12)]
    sources = [{"path": jsonl(tmp_path / f"{name}.jsonl", rows)} for name in "ab"]
    feed = load_prompts(data_of(sources), "train", chat, seed=0)
    orders = [[p.id.split("/")[1] for p in map(feed.draw, range(24)) if p.source == name] for name in "ab"]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_later_turn_is_rendered_as_training_would_see_it(chat):
    """render + reply + render_turns equals the ids of the whole conversation, up to where the policy speaks again."""
    conversation = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
    ids, mask = chat.mask_turns(conversation)
    played = chat.render(conversation[:1]) + chat.encode("2") + [chat.hf.eos_token_id]
    played += chat.render_turns(conversation[1], conversation[2:3])
    assert ids[: len(played)] == played
    assert mask[len(played)]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_path):
    tokenizer = ChatTokenizer(tiny_path, "chat")
    tokenizer.hf.chat_template = "{{ messages | length }}" + tokenizer.hf.chat_template
    with pytest.raises(UserError, match="rewrites earlier turns"):
        tokenizer.mask_turns([user("1"), assistant("2"), user("3"), assistant("4")])


def test_a_tokenizer_without_a_template_names_the_setting(tiny_path, tmp_path):
    ChatTokenizer(tiny_path, "chat").save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"data\.template=plain"):
        ChatTokenizer(str(tmp_path), "chat")
    plain = ChatTokenizer(str(tmp_path), "plain")
    assert plain.render([user("1+1=")]) == plain.encode("1+1=")


def test_rows_to_learn_from_that_do_not_fit_are_counted_by_reason(chat, tmp_path):
    rows: list[dict[str, Any]] = [
        {"messages": [user("1+1="), assistant("2")]},
        {"messages": [user("1+1=")]},
        {"messages": [user("1" * 30), assistant("2")]},
        {"messages": [user("1+1="), assistant(" ")]},
        {"messages": [{"role": "user"}]},
        {"id": "none", "other": 1},
        {"messages": [user("2+2="), assistant("4")], "id": "last"},
    ]
    feed = groups_of(chat, tmp_path, rows, kind="conversations")
    assert [g[0].prompt.id for g in feed.all()] == ["0", "last"]
    assert unfit_of(feed) == {
        "no_reply": (1, "1"),
        "too_long": (1, "2"),
        "empty": (1, "3"),
        "bad_messages": (1, "4"),
        "missing_column": (1, "none"),
    }
    [sample] = feed.all()[0]
    assert sample.reward is None and not any(sample.rollout_logp) and set(sample.versions) == {-1}


TALK = [{"role": "system", "content": "s"}, user("1+1="), assistant("2"), user("2+2="), assistant("4"), user("bye")]


@pytest.mark.parametrize(
    ("learn", "said"),
    [
        (["assistant"], "2<|end|>|4<|end|>"),
        ("last_reply", "4<|end|>"),
        (["user"], "1+1=|2+2=|bye"),  # the template ends a user's turn with nothing
        (["assistant", "system"], "s|2<|end|>|4<|end|>"),
        (
            "everything",
            "<|system|>s<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>4<|end|><|user|>bye",
        ),
    ],
)
def test_what_a_recipe_says_is_learnt_is_learnt(chat, tmp_path, learn, said):
    feed = groups_of(chat, tmp_path, [{"messages": TALK}], kind="conversations", train_on=learn, max_tokens=60)
    [[sample]] = feed.all()
    assert spoken(chat, sample) == said
    as_usual, _ = chat.mask_turns(TALK)
    assert sample.token_ids[: len(as_usual)].tolist() == as_usual, "the tokens do not depend on what is learnt of them"


def test_another_role_is_learnt_with_its_end_of_turn_but_not_its_header(tiny_path):
    chat = ChatTokenizer(tiny_path, "chat")
    chat.hf.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + (m['content'] | trim) + '<|end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    ids, mask = chat.mask_turns([user(" user: hi "), assistant("yes"), user("end"), assistant("ok")], ["user"])
    learnt = [chat.hf.convert_ids_to_tokens(i) for i, m in zip(ids, mask, strict=True) if m]
    assert learnt == [*"user: hi", "<|end|>", *"end", "<|end|>"]


def test_a_template_of_the_plain_kind_can_learn_everything(tiny_path):
    plain = ChatTokenizer(tiny_path, "plain")
    ids, mask = plain.mask_turns([user("1+1="), assistant("2")], "everything")
    assert ids == [*plain.encode("1+1=2"), plain.hf.eos_token_id] and all(mask)


def test_a_role_to_learn_that_no_row_has_is_refused(chat, tmp_path):
    with pytest.raises(UserError, match=r"data\.train_on names the role tool, and no row .* turns of assistant, user"):
        rows = [{"messages": [user("1+1="), assistant("2")]}]
        groups_of(chat, tmp_path, rows, kind="conversations", train_on=["assistant", "tool"])


ASKED = [user("1+1="), assistant("2"), user("2+2=")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED, "chosen": "4", "rejected": "5"},
        {"messages": ASKED, "chosen": [assistant("4")], "rejected": [assistant("5")]},
        {"messages": ASKED, "chosen": [*ASKED, assistant("4")], "rejected": [*ASKED, assistant("5")]},
        {"messages": ASKED, "chosen": "4", "rejected": [*ASKED, assistant("5")]},
        {"chosen": [*ASKED, assistant("4")], "rejected": [*ASKED, assistant("5")]},
        {"messages": "1+1=", "chosen": [*ASKED[1:], assistant("4")], "rejected": [*ASKED[1:], assistant("5")]},
    ],
    ids=["text", "reply turns", "whole conversations", "mixed", "no messages", "several reply turns"],
)
def test_a_pair_is_two_replies_to_one_prompt_however_it_is_written(chat, tmp_path, row):
    [[chosen, rejected]] = groups_of(chat, tmp_path, [row], kind="pairs").all()
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert [spoken(chat, s) for s in (chosen, rejected)] == ["4<|end|>", "5<|end|>"]
    before = chat.render(ASKED)
    assert chosen.token_ids[: len(before)].tolist() == rejected.token_ids[: len(before)].tolist() == before
    assert chosen.prompt is rejected.prompt and chosen.prompt.messages == ASKED


def test_pairs_that_cannot_be_compared_are_counted_by_reason(chat, tmp_path):
    def pair(asked, chosen, rejected, **more):
        return {"messages": asked, "chosen": chosen, "rejected": rejected, **more}

    rows = [
        pair("1+1=", "2", "3", id="fits", answer="2"),
        pair("1+1=", "2", "2", id="same"),
        pair("1+1=", "2", "", id="empty"),
        pair("1+1=", "2", None, id="none"),
        pair("1+1=", "2", "1" * 30, id="long"),
        pair("1+1=", [user("9"), assistant("2")], "3", id="other prompt"),
        pair("1+1=", [assistant("0"), user("9"), assistant("2")], [assistant("2")], id="parts early"),
        pair("1+1=", "2", [user("1+1=")], id="no reply"),
        pair(None, "2", "3", id="no prompt"),
        pair([user("1+1="), assistant("2")], "2", "3", id="answered"),
    ]
    feed = groups_of(chat, tmp_path, rows, kind="pairs")
    assert [g[0].prompt.id for g in feed.all()] == ["fits"]
    assert feed.all()[0][0].prompt.answer == "2"
    assert unfit_of(feed) == {
        "same_reply": (1, "same"),
        "empty": (1, "empty"),
        "missing_column": (2, "none"),
        "too_long": (1, "long"),
        "not_one_prompt": (3, "other prompt"),
        "ends_in_reply": (1, "answered"),
    }


def test_a_labelled_reply_is_one_sample_with_its_label_as_reward(chat, tmp_path):
    talk = [*ASKED, assistant("4")]
    labels = [True, False, 1, 0, 1.0, "yes", 2, None]
    rows = [{"messages": talk, "label": label} for label in labels] + [{"messages": ASKED, "label": True}]
    feed = groups_of(chat, tmp_path, rows, kind="unpaired")
    assert [g[0].reward for g in feed.all()] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert {spoken(chat, s) for [s] in feed.all()} == {"4<|end|>"}
    assert unfit_of(feed) == {"bad_label": (2, "5"), "missing_column": (1, "7"), "no_reply": (1, "8")}


ROWS = [{"q": f"{i}+1=", "a": str(i + 1), "level": i} for i in range(4)]
MAPPED = {"columns": {"messages": "q", "answer": "a"}}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "one split", "splits"])
def test_every_form_of_a_source_holds_the_same_rows(chat, tmp_path, form):
    from datasets import Dataset, DatasetDict

    made, path = Dataset.from_list(ROWS), tmp_path / "set"
    match form:
        case "jsonl":
            path = tmp_path / "set.jsonl"
            jsonl(path, ROWS)
        case "parquet":
            path = tmp_path / "set.parquet"
            made.to_parquet(path)
        case "one split":
            made.save_to_disk(path)
        case "splits":
            DatasetDict({"test": made}).save_to_disk(path)
    source = {"path": str(path), **MAPPED} | ({"split": "test"} if form == "splits" else {})
    feed = load_prompts(data_of([source]), "train", chat, seed=0)
    assert [(p.messages, p.answer, p.extra, p.source) for p in feed.all()] == [
        ([user(row["q"])], row["a"], {"level": row["level"]}, "set") for row in ROWS
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "hub:nobody/nothing/config"}, "cannot be loaded from the hub: Couldn't reach 'nobody/nothing'"),
        ({"path": "hub:nobody/nothing", "lazy": True}, "(split train) cannot be loaded from the hub: Couldn't reach"),
        ({"path": "splits"}, "no split 'train'; it has test: set split"),
        ({"path": "one", "split": "test"}, "holds one split (None), and split is 'test'"),
        ({"path": "empty"}, "did not make"),
        ({"path": "rows.jsonl"}, "has no column messages; it has a, level, q"),
        ({"path": "rows.jsonl", "columns": {"messages": "question"}}, "has no column question"),
        ({"path": "rows.jsonl", "columns": {"messages": "q", "chosen": "a"}}, "columns names chosen, and only"),
        ({"path": "list.jsonl"}, "line 1 is not a JSON object"),
        ({"path": "roles.jsonl"}, "such as row 0: a message has the role 'bishop', which is none of"),
        ({"path": "nowhere.parquet"}, "there is no such file"),
    ],
    ids=str,
)
def test_a_source_that_cannot_be_read_gets_one_sentence(chat, tmp_path, source, words):
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "one")
    DatasetDict({"test": made}).save_to_disk(tmp_path / "splits")
    (tmp_path / "empty").mkdir()
    jsonl(tmp_path / "rows.jsonl", ROWS)
    jsonl(tmp_path / "list.jsonl", [[1]])
    jsonl(tmp_path / "roles.jsonl", [{"messages": [{"role": "bishop", "content": "?"}]}])
    path = source["path"] if source["path"].startswith("hub:") else str(tmp_path / source["path"])
    with pytest.raises(UserError) as refused:
        load_prompts(data_of([source | {"path": path}]), "train", chat, seed=0)
    said = str(refused.value)
    assert words in said and said.startswith(f"data.train={path}") and "\n" not in said


def test_a_mixture_draws_its_shares_and_tells_them(chat, tmp_path):
    many = jsonl(tmp_path / "many.jsonl", [{"messages": [user(f"{i}+1=")]} for i in range(9)])
    few = jsonl(tmp_path / "few.jsonl", [{"messages": [user(f"{i}-1=")]} for i in range(2)])
    feed = load_prompts(data_of([{"path": many, "ratio": 3}, {"path": few}]), "train", chat, seed=0)
    drawn = [feed.draw(t) for t in range(12)]
    assert [p.source for p in drawn] == ["many", "many", "many", "few"] * 3
    assert len({p.id for p in feed.all()}) == 11, "ids are unique in a mixture"
    assert {p.id for p in drawn if p.source == "many"} == {f"many/{i}" for i in range(9)}, "a pass"
    assert feed.mixed == ["many", "few"]
    assert feed.count_draws(12) == {
        "data/many/rows": 9.0,
        "data/many/epoch": 1.0,
        "data/few/rows": 3.0,
        "data/few/epoch": 1.5,
    }
    alone = load_prompts(data_of(many), "train", chat, seed=0)
    assert alone.mixed == [] and alone.count_draws(12) == {}
