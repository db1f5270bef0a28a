"""New tokens: their rows, the tokenizer, and training, sync and save of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from core.errors import UserError
from data_prep import add_tokens
from data_prep.tiny_model import make_tokenizer, save_model
from modeling.saved_model import SavedModelWrong, check_saved

pytestmark = pytest.mark.usefixtures("one_thread")

THINKS = """
def score(prompt, messages):
    return {"correct": float("<think>" in messages[-1]["content"])}
"""
TOKENS, SPECIAL = ["<think>", "</think>"], ["<|end_of_thought|>"]


def a_base(folder: Path, *, tied: bool, padded: int = 0, dtype: torch.dtype = torch.float32) -> str:
    """A random Llama with the tokenizer of characters; padded: rows without a token."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + padded, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.05,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    save_model(LlamaForCausalLM(config).to(dtype), tokenizer, folder)
    return str(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padded", [0, 2, 9])
def test_new_rows_are_the_mean_of_the_others(tied, padded, tmp_path, capsys):
    base = a_base(tmp_path / "base", tied=tied, padded=padded)
    (tmp_path / "base" / "LICENSE").write_text("Do good.")
    add_tokens.main(["--model", base, "--out", str(tmp_path / "out"), "--tokens", *TOKENS, "--special", *SPECIAL])
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (base, tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    n = len(AutoTokenizer.from_pretrained(base))
    assert tokenizer.convert_tokens_to_ids([*TOKENS, *SPECIAL]) == [n, n + 1, n + 2]
    rows = max(n + padded, n + 3)
    assert after.config.vocab_size == rows and f"rows for {rows} ids, and had {n + padded}" in capsys.readouterr().out
    for old, new in (
        (before.model.embed_tokens.weight, after.model.embed_tokens.weight),
        (before.lm_head.weight, after.lm_head.weight),
    ):
        assert torch.equal(new[:n], old[:n]) and len(new) == rows
        torch.testing.assert_close(new[n : n + 3], old[:n].mean(0).expand(3, -1))
        assert torch.equal(new[n + 3 :], old[n + 3 :]), "rows without a token are left alone"
    assert (after.lm_head.weight is after.model.embed_tokens.weight) == tied == after.config.tie_word_embeddings
    check_saved(tmp_path / "out", dtype="float32")
    assert (tmp_path / "out" / "LICENSE").read_text() == "Do good."
    ids = tokenizer.encode("1<think>2</think><|end_of_thought|>3", add_special_tokens=False)
    assert [ids[1], ids[3], ids[4]] == [n, n + 1, n + 2] and len(ids) == 6
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1<think>2</think>3", "what rewards read"


def test_a_model_in_bfloat16_stays_so_and_its_mean_is_exact(tmp_path):
    base = a_base(tmp_path / "base", tied=True, dtype=torch.bfloat16)
    [i] = add_tokens.make(base, tmp_path / "out", tokens=["<think>"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weight = model.model.embed_tokens.weight
    assert weight.dtype == torch.bfloat16 and torch.equal(weight[i], weight[:i].float().mean(0).bfloat16())


def test_what_was_wrong_with_the_base_model_is_said_when_it_is_saved(tmp_path, capsys):
    base = a_base(tmp_path / "base", tied=True)
    (tmp_path / "base/generation_config.json").write_text('{"temperature": 0.5}')
    add_tokens.make(base, tmp_path / "out", tokens=["<a>"])
    first, last = capsys.readouterr().out.splitlines()
    assert first == (
        "generation_config.json of the base model is invalid (temperature=0.5): it is saved with do_sample=true"
    )
    assert last.startswith(f"{tmp_path}/out: 1 new tokens (<a> ")


def test_a_model_that_was_saved_wrongly_is_an_error(tmp_path, monkeypatch):
    base, save = a_base(tmp_path / "base", tied=False), LlamaForCausalLM.save_pretrained

    def lose_one(model, folder, **how):
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
        save(model, folder, **how | {"state_dict": tensors})

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", lose_one)
    with pytest.raises(SavedModelWrong, match=r"its files lack model\.norm\.weight"):
        add_tokens.make(base, tmp_path / "out", tokens=["<a>"])


REFUSED = {
    "known": ({"tokens": ["<|end|>"]}, r"<\|end\|> is a token already"),
    "twice": ({"tokens": ["<a>"], "special": ["<a>"]}, "<a> is named twice"),
    "empty": ({"tokens": [" "]}, "is empty"),
    "none": ({}, "name at least one token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_token_that_is_no_new_one_is_refused(case, tiny_path, tmp_path):
    given, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        add_tokens.make(tiny_path, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_and_a_missing_model_are_refused(tiny_path, tmp_path):
    with pytest.raises(UserError, match="is there already"):
        add_tokens.make(tiny_path, tmp_path, tokens=["<a>"])
    with pytest.raises(UserError, match=r"--model=.* does not exist"):
        add_tokens.make(str(tmp_path / "missing"), tmp_path / "out", tokens=["<a>"])


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_are_trained_and_saved(tied, tmp_path, trained):
    ids = add_tokens.make(a_base(tmp_path / "base", tied=tied), tmp_path / "more", tokens=TOKENS)
    rows = [{"messages": "1+1=", "answer": "<think>one more</think>2"}] * 8
    data = tmp_path / "rows.jsonl"
    turns = [[{"role": "user", "content": r["messages"]}, {"role": "assistant", "content": r["answer"]}] for r in rows]
    data.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    changes = {"model.path": str(tmp_path / "more"), "data.train": str(data), "data.max_tokens": 64, "steps": 2}
    folder = trained(changes, kind="sl") / "model"
    check_new_tokens(tmp_path / "more", folder, ids, tied=tied)


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_are_synced_to_the_engine_and_sampled(tied, tmp_path, trained):
    ids = add_tokens.make(a_base(tmp_path / "base", tied=tied), tmp_path / "more", tokens=TOKENS)
    reward = tmp_path / "thinks.py"
    reward.write_text(
        "def score(prompt, messages):\n    return {'correct': float('<think>' in messages[-1]['content'])}\n"
    )
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": f"{i}<think>=", "answer": "1"}) + "\n" for i in range(8)))
    changes = {
        "model.path": str(tmp_path / "more"),
        "data.train": str(data),
        "reward.function": str(reward),
        "steps": 3,
    }
    run = trained(changes | {"group_size": 16, "trainer.lr": 1e-2})
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["reward/mean"] for row in metrics) > 0, "the token was sampled, and rewards read it"
    # compared after every sync, with a prompt that holds the token
    assert all(row["sync/probe_gap"] < 1e-4 and row["train/mismatch/abs_logp"] < 1e-3 for row in metrics)
    check_new_tokens(tmp_path / "more", run / "model", ids, tied=tied)


def check_new_tokens(base: Path, folder: Path, ids: list[int], *, tied: bool) -> None:
    """The rows of the new tokens were trained, apart from each other, and the tie is as it was."""
    start, model = (AutoModelForCausalLM.from_pretrained(path) for path in (base, folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(TOKENS) == ids
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, new = start.get_parameter(name), model.get_parameter(name)
        assert not torch.equal(new[ids[0]], old[ids[0]])
    assert not torch.equal(model.lm_head.weight[ids[0]], model.lm_head.weight[ids[1]])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    check_saved(folder, dtype="float32")
