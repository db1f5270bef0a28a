"""Rows of every form that data sets come in, with what each becomes, or the sentence with which it is refused."""

from __future__ import annotations

import json
from typing import Any

from unit_tests.helpers.chat_families import WEATHER, assistant, call, result, user

Q, A, B = "What is 2+2?", "4", "5"
ASKED, SAID, BAD = user(Q), assistant(A), assistant(B)
TALK = [ASKED, SAID]
BRIEF = {"role": "system", "content": "Be brief."}
LONG = [user("1+1="), assistant("2"), *TALK]
ENDS = ["4<|im_end|>"]
HUMAN, GPT = {"from": "human", "value": Q}, {"from": "gpt", "value": A}
CALLS = [
    {"from": "human", "value": "Cold?"},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"place": "Rome"}}'},
    {"from": "observation", "value": "21"},
    {"from": "gpt", "value": "No."},
]
CALLED = [user("Cold?"), assistant("", call("weather", place="Rome")), result("21"), assistant("No.")]
BARE_TOOL = WEATHER["function"]
GROUND = {"style": "rule", "ground_truth": "4"}

CONVERSATIONS: dict[str, tuple[Any, str, Any, Any]] = {
    # name: (a row or rows, the form, the conversation it becomes, what is trained on)
    "ours": ({"messages": TALK}, "ours", TALK, ENDS),
    "OpenAI, with nulls": ({"messages": [ASKED | {"refusal": None}, SAID], "tools": None}, "ours", TALK, ENDS),
    "OpenAI, developer": ({"messages": [BRIEF | {"role": "developer"}, *TALK]}, "ours", ..., ENDS),
    "OpenAI, weight of a turn": ({"messages": [LONG[0], LONG[1] | {"weight": 0}, *TALK]}, "ours", ..., ENDS),
    "axolotl, train of a turn": ({"messages": [LONG[0], LONG[1] | {"train": False}, *TALK]}, "ours", ..., ENDS),
    "JSON text of turns": ({"messages": json.dumps(TALK)}, "ours", TALK, ENDS),
    "system beside messages": ({"system": "Be brief.", "messages": TALK}, "messages_system", [BRIEF, *TALK], ENDS),
    "TRL prompt-completion, text": ({"prompt": Q, "completion": A}, "prompt_completion", TALK, ENDS),
    "TRL prompt-completion, turns": ({"prompt": [ASKED], "completion": [SAID]}, "prompt_completion", TALK, ENDS),
    "prompt and response": ({"prompt": Q, "response": A, "score": 3}, "prompt_completion", TALK, ENDS),
    "JSON text of a prompt": ({"prompt": json.dumps(LONG[:3]), "response": A}, "prompt_completion", LONG, ...),
    "OpenRLHF": ({"input": Q, "output": A}, "openrlhf", TALK, ENDS),
    "Nemotron": ({"input": [BRIEF, ASKED], "output": A}, "openrlhf", [BRIEF, *TALK], ENDS),
    "question and answer": ({"question": Q, "answer": A}, "question_answer", TALK, ENDS),
    "problem and solution": ({"problem": Q, "solution": A}, "question_answer", TALK, ENDS),
    "ms-swift": (
        {"system": "Be brief.", "query": Q, "response": A, "history": [["1+1=", "2"]]},
        *("question_answer", [BRIEF, *LONG], ["2<|im_end|>", *ENDS]),
    ),
    "Alpaca": ({"instruction": "What is", "input": "2+2?", "output": A}, "alpaca", [user("What is\n2+2?"), SAID], ENDS),
    "Alpaca, the original": ({"instruction": Q, "input": "", "output": A, "text": "Below"}, "alpaca", TALK, ENDS),
    "Dolly": ({"instruction": Q, "context": "", "response": A, "category": "sums"}, "alpaca", TALK, ENDS),
    "LLaMA-Factory, Alpaca": (
        {"instruction": Q, "input": "", "output": A, "system": "Be brief.", "history": [["1+1=", "2"]]},
        *("alpaca", [BRIEF, *LONG], ["2<|im_end|>", *ENDS]),
    ),
    "ShareGPT": ({"conversations": [HUMAN, GPT]}, "sharegpt", TALK, ENDS),
    "ShareGPT, system": ({"conversations": [HUMAN, GPT], "system": "Be brief."}, "sharegpt", [BRIEF, *TALK], ENDS),
    "ShareGPT, a system turn": (
        {"conversations": [{"from": "system", "value": "Be brief."}, HUMAN, GPT]},
        *("sharegpt", [BRIEF, *TALK], ENDS),
    ),
    "ShareGPT, weights": (
        {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2", "weight": 0}, HUMAN, GPT]},
        *("sharegpt", ..., ENDS),
    ),
    "ShareGPT, JSON text": ({"conversations": json.dumps([HUMAN, GPT])}, "sharegpt", TALK, ENDS),
    "ShareGPT under messages": ({"messages": [HUMAN, GPT]}, "sharegpt", TALK, ENDS),
    "ShareGPT roles": (
        {"messages": [{"role": "human", "content": Q}, {"role": "gpt", "content": A}]},
        *("sharegpt", TALK, ENDS),
    ),
    "conversations with our roles": ({"conversations": TALK}, "sharegpt", TALK, ENDS),
    "LLaMA-Factory, calls": (
        {"conversations": CALLS, "tools": json.dumps([BARE_TOOL])},
        *("sharegpt", CALLED, ["<tool_call>...</tool_call><|im_end|>", "No.<|im_end|>"]),
    ),
    "pairs of turns": ({"conversation": [{"input": "1+1=", "output": "2"}, {"input": Q, "output": A}]},
                       *("turn_pairs", LONG, ["2<|im_end|>", *ENDS])),
    "The Cauldron, text": ({"texts": [{"user": Q, "assistant": A, "source": "x"}]}, "turn_pairs", TALK, ENDS),
}  # fmt: skip
PLAIN: dict[str, tuple[Any, str, str, Any]] = {
    "axolotl, segments": (
        {"segments": [{"label": False, "text": "Q: 2+2? A: "}, {"label": True, "text": "4</s>"}]},
        *("segments", "Q: 2+2? A: 4</s>", ["4</s>"]),
    ),
    "raw text": ({"text": "2+2=4"}, "text", "2+2=4", ["2+2=4"]),
}
PAIRS: dict[str, tuple[Any, str]] = {
    "TRL, text": ({"prompt": Q, "chosen": A, "rejected": B}, "preference"),
    "TRL, turns": ({"prompt": [ASKED], "chosen": [SAID], "rejected": [BAD]}, "preference"),
    "TRL, implicit prompt": ({"chosen": TALK, "rejected": [ASKED, BAD]}, "ours"),
    "text that begins with the prompt": ({"prompt": Q, "chosen": Q + A, "rejected": Q + B}, "preference"),
    "UltraFeedback": (
        {"prompt": Q, "chosen": TALK, "rejected": [ASKED, BAD], "messages": TALK, "score_chosen": 8.0},
        "preference",
    ),
    "OpenAI": (
        {"input": {"messages": [ASKED], "tools": []}, "preferred_output": [SAID], "non_preferred_output": [BAD]},
        "openai_dpo",
    ),
    "Orca": ({"system": "", "question": Q, "chosen": A, "rejected": B}, "question_answer"),
    "LLaMA-Factory, Alpaca": ({"instruction": Q, "input": "", "chosen": A, "rejected": B}, "alpaca"),
    "LLaMA-Factory, ShareGPT": (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": B}},
        "sharegpt",
    ),
    "ours": ({"messages": [ASKED], "chosen": A, "rejected": B, "prompt_id": 3}, "ours"),
}
UNPAIRED: dict[str, tuple[Any, str]] = {
    "ours": ({"messages": TALK, "label": True}, "ours"),
    "TRL": ({"prompt": Q, "completion": A, "label": True}, "prompt_completion"),
    "TRL, turns": ({"prompt": [ASKED], "completion": [SAID], "label": True}, "prompt_completion"),
    "OpenRLHF": ({"input": Q, "output": A, "label": 1}, "openrlhf"),
    "LLaMA-Factory, Alpaca": ({"instruction": Q, "output": A, "kto_tag": True}, "alpaca"),
    "LLaMA-Factory, ShareGPT": ({"conversations": [HUMAN, GPT], "kto_tag": True}, "sharegpt"),
    "LLaMA-Factory, OpenAI": ({"messages": TALK, "kto_tag": True}, "kto_tag"),
}
SCORED: dict[str, tuple[Any, str]] = {
    "ours": ({"messages": [ASKED], "completions": [A, B], "rewards": [1.0, 0.0]}, "ours"),
}
PROMPTS: dict[str, tuple[Any, str, str]] = {
    # name: (a row, the form, the answer)
    "ours": ({"messages": [ASKED], "answer": "4"}, "ours", "4"),
    "TRL prompt-only": ({"prompt": [ASKED], "solution": "4"}, "prompt_only", "4"),
    "prompt and ground truth": ({"prompt": Q, "ground_truth": 4}, "prompt_only", "4"),
    "slime": ({"prompt": Q, "label": "4", "metadata": {}}, "prompt_only", "4"),
    "verl": (
        {"data_source": "sums", "prompt": [ASKED], "ability": "m", "reward_model": GROUND, "extra_info": {"index": 7}},
        *("verl", "4"),
    ),
    "SkyRL": ({"prompt": [ASKED], "env_class": "m", "reward_spec": {"ground_truth": "4"}}, "skyrl", "4"),
    "OpenRLHF": ({"input": Q, "label": "4"}, "openrlhf", "4"),
    "verifiers": ({"question": Q, "answer": "4", "info": {}}, "question_answer", "4"),
    "problem and answer": ({"problem": Q, "expected_answer": "4"}, "question_answer", "4"),
    "Alpaca": ({"instruction": Q, "input": "", "answer": "4"}, "alpaca", "4"),
    "ShareGPT": ({"conversations": [HUMAN], "answer": "4"}, "sharegpt", "4"),
}
REFUSED: dict[str, tuple[str, Any, str]] = {
    # name: (the kind of row, a row or rows, the sentence with the fix)
    "two forms": (
        "conversations",
        {"messages": TALK, "problem": Q, "solution": A},
        "fits two forms, ours .our columns. and question_answer .messages = problem \\+ solution.: write data.train: "
        "\\[{path: .*x.jsonl, form: ours}\\], or form: question_answer",
    ),
    "messages and conversations": ("conversations", {"messages": TALK, "conversations": [HUMAN, GPT]}, "two forms"),
    "two answers": (
        "prompts",
        {"problem": Q, "answer": "4", "solution": "2+2=4"},
        "of which one is meant: write columns: {messages: problem, answer: answer} or columns: {messages: problem, "
        "answer: solution}",
    ),
    "two replies": (
        "conversations",
        {"problem": Q, "solution": A, "answer": "4"},
        "columns: {messages: problem, completion: answer} or columns: {messages: problem, completion: solution}",
    ),
    "columns of no form": ("prompts", {"id": 3, "q": Q}, r"no column messages; it has id, q: .*columns: {messages: q}"),
    "pairs in place of conversations": (
        "conversations",
        {"prompt": Q, "chosen": A, "rejected": B},
        "rows of form preference, which are pairs, for alg.name: dpo of main_sl.py, and conversations",
    ),
    "prompts in place of conversations": (
        "conversations",
        {"prompt": Q, "solution": A},
        "form prompt_only, which are prompts",
    ),
    "another form in one row": (
        "conversations",
        [{"prompt": Q, "completion": A}, {"prompt": Q, "completion": 4}],
        "columns of form prompt_completion, and row 1 is .*its completion is 4.*form: prompt_completion}",
    ),
    "token ids": ("conversations", {"input_ids": [1, 2], "labels": [-100, 2]}, "token ids, .*give the text"),
    "TRL stepwise": (
        "conversations",
        {"prompt": Q, "completions": ["2+2", "=4"], "labels": [True, True]},
        "process reward models.*column completion",
    ),
    "HH-RLHF": (
        "pairs",
        {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {A}", "rejected": f"\n\nHuman: {Q}\n\nAssistant: {B}"},
        "run python -m data_prep.hh_rlhf --from",
    ),
    "segments under a chat template": (
        "conversations",
        {"segments": [{"label": True, "text": A}]},
        "which no chat template writes: set data.template: plain$",
    ),
    "raw text under a chat template": (
        "conversations",
        {"text": "2+2=4"},
        "set data.template: plain and data.train_on: everything$",
    ),
    "an unknown role": (
        "conversations",
        {"conversations": [{"from": "bishop", "value": Q}, GPT]},
        "from bishop, which is none of human, user, gpt",
    ),
    "videos": ("conversations", {"messages": TALK, "videos": ["a.mp4"]}, "it has videos, which are not read"),
    "two system prompts": (
        "conversations",
        {"system": "Be long.", "conversations": [{"from": "system", "value": "Be brief."}, HUMAN, GPT]},
        "different system turns",
    ),
}  # fmt: skip


COLUMNS: dict[str, tuple[str, Any, dict[str, str], str]] = {
    # name: (the kind of row, a row, columns, the answer or the end of the sentence)
    "verl without an answer": (
        *("prompts", {"prompt": [ASKED], "reward_model": GROUND}, {"messages": "prompt"}),
        "no row has an answer, and reward_model.ground_truth holds one: write answer: reward_model.ground_truth into",
    ),
    "a dotted path": (
        *("prompts", {"prompt": [ASKED], "reward_model": GROUND}),
        *({"messages": "prompt", "answer": "reward_model.ground_truth"}, ""),
    ),
    "a path into a list": ("prompts", {"q": Q, "a": {"text": [4]}}, {"messages": "q", "answer": "a.text.0"}, ""),
    "a path to nothing": (
        *("prompts", {"q": Q, "a": {"b": 1}}, {"messages": "q", "answer": "a.c"}),
        "has no column a.c; it has a, q: name the one meant in columns",
    ),
    "raw text": (
        *("conversations", {"body": "2+2=4"}, {"messages": "body"}),
        "would write as the turn of a user: set data.template: plain and data.train_on: everything .*completion: ",
    ),
    "question and reply": ("conversations", {"q": Q, "a": A}, {"messages": "q", "completion": "a"}, ""),
    "turns and reply": ("conversations", {"q": [ASKED], "a": A}, {"messages": "q", "completion": "a"}, ""),
}
