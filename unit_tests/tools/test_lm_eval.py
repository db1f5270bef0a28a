"""lm_eval, the harness itself, on our scorer and engines: its numbers are those of plain transformers."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from configs.trainer_schema import ModelConfig
from core.errors import UserError
from driver.evaluation.suites.likelihood import Likelihood, LikelihoodScorer
from driver.evaluation.suites.texts import choose_engine, cut_text, split_ends
from tools import lm_eval as program
from tools.lm_eval_requests import Asked, read_request

pytestmark = pytest.mark.usefixtures("one_thread")
DOCS = [
    {"question": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1), "no idea"], "answer": 0}
    for a, b in [(1, 2), (3, 9)]
] + [{"question": "5-", "choices": ["4=1", "4=" + "1" * 9, "x"], "answer": 1}]
LONG = "to be or not to be, that is the question " * 11 + "whether"


def plain_logits(path: str, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(torch.tensor([ids])).logits[0]


def plain_likelihood(path: str, context: list[int], continuation: list[int]) -> Likelihood:
    logits = plain_logits(path, [*context, *continuation])[len(context) - 1 : -1]
    logp = logits.log_softmax(-1)[range(len(continuation)), continuation]
    greedy = logits.argmax(-1).tolist() == continuation
    return Likelihood(logp=float(logp.double().sum()), is_greedy=greedy)


def test_likelihoods_are_those_of_plain_transformers_however_they_are_packed(tiny_path):
    contexts = [[7, 8, 9, 10], [7, 8, 9, 11, 12, 13], [20]]
    pairs = [(context, ids) for ids in ([30], [31, 32, 33]) for context in contexts]
    likely = plain_logits(tiny_path, contexts[0])[-1].argmax().item()
    pairs += [(contexts[0], [likely]), (contexts[0], [likely, 6])]
    scorer = LikelihoodScorer(ModelConfig(path=tiny_path, dtype="float32"))
    found = dict(scorer.score(pairs))
    assert sorted(found) == [*range(len(pairs))]
    for i, (context, continuation) in enumerate(pairs):
        wanted = plain_likelihood(tiny_path, context, continuation)
        assert found[i].logp == pytest.approx(wanted.logp, abs=1e-4)
        assert found[i].is_greedy == wanted.is_greedy
    assert found[6].is_greedy and not found[7].is_greedy


def test_what_a_task_asks_for_is_read_and_what_we_do_not_have_is_refused():
    greedy = {"until": ["\n", "Q:"], "do_sample": False, "temperature": 0.7, "top_p": 0.5, "max_new_tokens": 3}
    assert read_request("a", greedy) == Asked(context="a", ends=("\n", "Q:"), temperature=0.0, max_new_tokens=3)
    assert read_request("a", {"temperature": 0.7}).temperature == 0.7
    for bad, word in [
        ({"temperature": 1.0, "top_p": 0.9}, "top_p=0.9"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"guidance": 2}, "guidance=2"),
        ({"do_sample": True}, "do_sample without a temperature"),
    ]:
        with pytest.raises(UserError, match=word):
            read_request("a", bad)


def test_a_special_token_ends_a_reply_as_a_token_and_other_texts_as_texts(tiny_path):
    from data_feeds.chat.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(tiny_path, "plain")
    [user] = tokenizer.encode("<|user|>")
    assert split_ends(tokenizer, ["\n", "<|user|>", "<|end|>", ""]) == (["\n"], [user])
    assert cut_text("a\nb", ["b", "\n"]) == "a"
    with pytest.raises(UserError, match="never in the text"):
        split_ends(tokenizer, ["<|end|><|user|>"])
    with pytest.raises(UserError, match="runs on one rank"):
        choose_engine("hf", tensor_parallel_size=2)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_package_one_sentence_says_how_to_install_it():
    with pytest.raises(UserError, match=r"pip install -c constraints.txt lm_eval"):
        program.main(["--model", "x", "--tasks", "y"])


def write_tasks(folder: Path) -> list[str]:
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (folder / "long.jsonl").write_text(json.dumps({"text": LONG}) + "\n")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "num_fewshot": 0,
    }
    asked = {"doc_to_text": "{{question}}", "target_delimiter": ""}
    until = ["3", "<|user|>"]
    tasks = {
        "choose": {
            **asked,
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "write": {
            **asked,
            "output_type": "generate_until",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": until, "max_gen_toks": 9, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
        "draw": {
            **asked,
            "output_type": "generate_until",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": until, "max_gen_toks": 5, "do_sample": True, "temperature": 1.0},
            "metric_list": [{"metric": "exact_match"}],
        },
        "read": {
            "output_type": "loglikelihood_rolling",
            "dataset_kwargs": {"data_files": {"test": str(folder / "long.jsonl")}},
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, "task": name, **task}))
    return [str(folder / f"{name}.yaml") for name in tasks]


def plain_reply(path: str, ids: list[int], until: str, most: int) -> str:
    """Write the most probable tokens until one is `until`, a stop token of the model or a role."""
    tokenizer = find_tokenizer(path)
    ends = {*tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>", until])}
    start = len(ids)
    while len(ids) < start + most and (len(ids) == start or ids[-1] not in ends):
        ids = [*ids, int(plain_logits(path, ids)[-1].argmax())]
    return tokenizer.decode(ids[start:], skip_special_tokens=True).partition(until)[0]


def find_tokenizer(path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed here")
def test_the_harness_has_the_numbers_of_plain_transformers(tiny_path, tmp_path, monkeypatch):
    """Of four tasks on local files: a choice, texts greedy and sampled, and a text longer than the model."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks, out = write_tasks(tmp_path), tmp_path / "out"
    program.main(["--model", tiny_path, "--tasks", *tasks, "--output_path", str(out), "--log_samples"])
    [results] = [json.loads(path.read_text()) for path in out.rglob("results_*.json")]
    samples = {
        name: [json.loads(line) for line in next(out.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines()]
        for name in ("choose", "write", "draw", "read")
    }
    tokenizer = find_tokenizer(tiny_path)
    assert results["config"]["engine"] == "hf" and results["config"]["model_folder"] == tiny_path

    right, right_by_length = [], []
    for doc, sample in zip(DOCS, samples["choose"], strict=True):
        asked = tokenizer.encode(doc["question"])
        wanted = [plain_likelihood(tiny_path, asked, tokenizer.encode(choice)) for choice in doc["choices"]]
        found = [(float(one[0][0]), one[0][1] in (True, "True")) for one in sample["resps"]]
        assert [logp for logp, _ in found] == pytest.approx([one.logp for one in wanted], abs=1e-4)
        assert [greedy for _, greedy in found] == [one.is_greedy for one in wanted]
        by_length = [one.logp / len(choice) for one, choice in zip(wanted, doc["choices"], strict=True)]
        right.append(max(range(3), key=lambda i: wanted[i].logp) == doc["answer"])
        right_by_length.append(max(range(3), key=by_length.__getitem__) == doc["answer"])
    assert results["results"]["choose"]["acc,none"] == pytest.approx(sum(right) / 3)
    assert results["results"]["choose"]["acc_norm,none"] == pytest.approx(sum(right_by_length) / 3)

    texts = [plain_reply(tiny_path, tokenizer.encode(doc["question"]), "3", 9) for doc in DOCS]
    assert [sample["resps"][0][0] for sample in samples["write"]] == texts
    drawn = [sample["resps"][0][0] for sample in samples["draw"]]
    assert len({*drawn}) > 1 and all("3" not in text and len(text) <= 5 for text in drawn)

    ids, end, total = tokenizer.encode(LONG), tokenizer.eos_token_id, 0.0
    assert len(ids) > 256
    total += plain_likelihood(tiny_path, [end], ids[:256]).logp
    total += plain_likelihood(tiny_path, ids[len(ids) - 257 : 256], ids[256:]).logp
    assert float(samples["read"][0]["resps"][0][0]) == pytest.approx(total, abs=1e-2)
    perplexity = math.exp(-total / len(LONG.split()))
    assert results["results"]["read"]["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-3)

    with pytest.raises(UserError, match="--batch_size has no meaning"):
        program.main(["--model", tiny_path, "--tasks", "x", "--batch_size", "8"])
