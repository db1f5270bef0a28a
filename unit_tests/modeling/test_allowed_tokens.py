"""Allowed tokens: the engine samples from them, and the trainer's softmax is taken over them alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

import main_eval
from algs.grpo import GRPO
from analysis.capture.recompute import replay
from core.errors import RunStopped, UserError
from core.types.action_tokens import list_action_tokens
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.measures import ENTROPY
from data_feeds.chat.tokenizer import ChatTokenizer
from data_prep import tiny_vision_model
from driver.evaluation.suites.generations import WHOLE
from modeling.forward import forward
from rollouts.allowed_tokens import resolve_allowed_tokens
from rollouts.engines.hf import HfEngine
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.models import compute_policy, packed, random_model, some_samples
from unit_tests.helpers.runs import OWN_ENGINE, file_of

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 64
SETS = {
    "allowed": AllowedTokens(allowed=(0, *range(2, 40, 3))),
    "banned": AllowedTokens(banned=(3, 17, 63)),
}


def allows(allowed_tokens: AllowedTokens) -> Tensor:
    """Which of the tokens, [V]."""
    return torch.tensor([not allowed_tokens.find_outside([i]) for i in range(VOCABULARY)])


@pytest.mark.parametrize("allowed_tokens", SETS.values(), ids=SETS)
@pytest.mark.parametrize("chunk", [10**9, VOCABULARY * 7])
def test_the_softmax_is_that_of_the_listed_tokens(allowed_tokens, chunk, monkeypatch):
    monkeypatch.setattr("modeling.softmax.CHUNK_LOGITS", chunk)
    may = allows(allowed_tokens)
    torch.manual_seed(0)
    logits = (
        torch.randn(30, VOCABULARY, dtype=torch.float64) + 30 * ~may
    ).requires_grad_()  # all love what they may not
    labels = may.nonzero()[:, 0][torch.randint(int(may.sum()), (30,))]
    got = compute_policy(logits, labels, temperature=0.7, measures=ENTROPY, allowed_tokens=allowed_tokens)
    assert got.entropy is not None
    logp = (logits[:, may] / 0.7).log_softmax(-1)
    column = may.cumsum(0)[labels] - 1
    want = logp.gather(-1, column[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close((got.logp, got.entropy), want, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(a.sum() + b.square().sum(), logits)[0] for a, b in ((got.logp, got.entropy), want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert not gradients[0][:, ~may].any(), "a token that cannot be chosen gets no gradient"


@pytest.mark.parametrize(
    "allowed_tokens", [AllowedTokens(allowed=tuple(range(VOCABULARY))), AllowedTokens(banned=(99,))]
)
def test_a_head_in_chunks_takes_the_same_softmax(allowed_tokens):
    model = random_model("llama", vocab_size=4096)
    rows = some_samples(9, 20, 20, 3, 30)  # of ids below 64
    whole, chunked = (
        forward(
            model,
            model,
            packed(rows),
            layout="padded",
            temperature=0.7,
            measures=ENTROPY,
            logits_mib=mib,
            allowed_tokens=allowed_tokens,
        )
        for mib in (0, 1)
    )
    torch.testing.assert_close(whole.logp, chunked.logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.entropy, chunked.entropy, rtol=1e-5, atol=1e-5)
    free = forward(model, model, packed(rows), layout="padded", temperature=0.7).logp
    assert (whole.logp > free).all(), "less to choose from makes each choice more probable"


@pytest.mark.parametrize("allowed_tokens", SETS.values(), ids=SETS)
def test_a_trained_token_outside_of_the_set_stops_the_run(allowed_tokens, tiny_path):
    trainer = trainer_of(tiny_path, GRPO(), settings={"allowed_tokens": allowed_tokens})
    batches = [packed(some_samples(40, 40))]
    with pytest.raises(RunStopped, match="which the policy may not choose") as stopped:
        trainer.compute_columns(batches, frozenset({"prox_logp"}))
    with pytest.raises(RunStopped, match="which the policy may not choose"):
        trainer.step([batches])
    [named] = [int(word.rstrip(",")) for word in str(stopped.value).split() if word.rstrip(",").isdigit()]
    assert allowed_tokens.find_outside([named])


def loving_model(path: Path, tiny_path: str, prompt: list[int]) -> tuple[torch.nn.Module, int]:
    """Save a model whose next token after the prompt is almost surely one token; return both."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        loved = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        model.get_output_embeddings().weight[loved] += 12 * hidden / hidden.square().sum()
    model.save_pretrained(path)
    return model, loved


@pytest.mark.parametrize("kind", ["allowed", "banned"])
def test_a_forbidden_favourite_is_never_sampled_and_the_trainer_agrees(kind, tmp_path, tiny_path):
    prompt = [5, 6, 7, 8]
    model, loved = loving_model(tmp_path, tiny_path, prompt)
    size = model.config.vocab_size
    others = tuple(i for i in range(size) if i != loved)
    allowed_tokens = AllowedTokens(banned=(loved,)) if kind == "banned" else AllowedTokens(allowed=others[::3])

    def play(allowed_tokens: AllowedTokens, temperature: float = 1.0) -> list:
        engine = HfEngine(
            engine_config(tmp_path, temperature=temperature, max_model_len=64, allowed_tokens=allowed_tokens)
        )

        async def body():
            return await asyncio.gather(*(engine.generate(prompt, max_new_tokens=6, seed=i) for i in range(40)))

        return asyncio.run(body())

    free = [done.token_ids[0] for done in play(EVERY_TOKEN)]
    assert free.count(loved) > 35, "the policy loves this token"
    for temperature in (1.0, 0.0):
        for done in play(allowed_tokens, temperature):
            assert allowed_tokens.find_outside(done.token_ids) == []
            ids = torch.tensor([prompt + done.token_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            ours = compute_policy(logits, ids[0, len(prompt) :], temperature=1.0, allowed_tokens=allowed_tokens)
            assert done.logp == pytest.approx(ours.logp.tolist(), abs=1e-5)
    assert len({done.token_ids[0] for done in play(allowed_tokens)}) > 5


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> ChatTokenizer:
    """The tokenizer of a tiny model that sees and acts."""
    folder = tmp_path_factory.mktemp("seeing")
    tiny_vision_model.make(folder, layers=1, vision_layers=1, action_tokens=3)
    return ChatTokenizer(str(folder), "chat")


def test_stop_tokens_may_always_be_chosen_and_placeholders_never(seeing, tiny_path):
    text = ChatTokenizer(tiny_path, "chat")
    [end] = text.stop_token_ids
    assert resolve_allowed_tokens(text, [], [end]) == EVERY_TOKEN
    digits = [text.encode(digit)[0] for digit in "74"]
    assert resolve_allowed_tokens(text, ["7", "4"], [end, 90]) == AllowedTokens(
        allowed=tuple(sorted([end, 90, *digits]))
    )
    marks = ("<image>", "<fake_token_around_image>", "<global-img>")
    placeholders = tuple(sorted(seeing.hf.convert_tokens_to_ids(mark) for mark in marks))
    assert resolve_allowed_tokens(seeing, [], seeing.stop_token_ids) == AllowedTokens(banned=placeholders)
    actions = list_action_tokens(3)
    ids = [seeing.encode(token) for token in actions]
    assert [len(each) for each in ids] == [1, 1, 1], "one token each"
    assert resolve_allowed_tokens(seeing, actions, [end]) == AllowedTokens(
        allowed=tuple(sorted([end, *(i for [i] in ids)]))
    )
    with pytest.raises(UserError, match="names <image>, which stands for an image and is never sampled"):
        resolve_allowed_tokens(seeing, ["<act_0>", "<image>"], [end])


REFUSED = {
    "several tokens": (["12"], ["rollout.allowed_tokens names 12", "2 tokens"]),
    "twice": (["a", "a"], ["names a and a", "one token"]),
    "a stop token": (["a", "<|end|>"], ["names <|end|>", "always allowed"]),
    "nothing": ([""], ["rollout.allowed_tokens"]),
    "too many": ([str(i) for i in range(1001)], ["rollout.allowed_tokens", "1000"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_list_is_one_sentence_before_the_run(name, refused):
    tokens, words = REFUSED[name]
    refused({"rollout.allowed_tokens": tokens}, *words)


def test_an_engine_that_samples_from_all_tokens_is_refused(refused, tmp_path):
    mine = file_of(tmp_path / "mine.py", OWN_ENGINE)
    refused({"rollout.allowed_tokens": ["1"], "rollout.engine": mine}, "samples from all tokens")


def test_a_run_its_replay_and_an_evaluation_stay_in_the_set(trained, tmp_path, sums):
    """A reference, an entropy bonus and several updates: every log-probability of the step is the restricted one."""
    digits = list("0123456789")
    changes = {
        "rollout.allowed_tokens": digits,
        "alg": {"name": "grpo", "kl": {"coef": 0.1}, "entropy_coef": 0.01},
        "updates_per_step": 2,
        "capture.every": 1,
    }
    folder = trained(changes)
    rows = [json.loads(x) for n in (0, 1) for x in (folder / f"samples/step_0000{n}.jsonl").read_text().splitlines()]
    assert rows and all({*row["completion"]} <= {*digits} for row in rows)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "train/mismatch/kl" in line]
    assert steps and all(abs(line["train/mismatch/kl"]) < 1e-5 for line in steps)
    assert all(line["train/entropy"] < 2.4 for line in steps), "ln 11, and that of the vocabulary is 4.6"
    assert replay(folder / "snapshots" / "step_00000", []).is_reproduced

    given = {
        "name": "eval",
        "backend": "local",
        "run_dir": str(tmp_path / "runs"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"sets": [{"path": str(sums / "eval.parquet")}], "max_prompt_tokens": 32},
        "reward": {"function": "arithmetic", "workers": 1},
        "rollout": {"engine": "hf", "max_new_tokens": 8, "allowed_tokens": ["4", "2"]},
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(given))
    assert run_here(main_eval, "--config", str(tmp_path / "eval.yaml")) == (0, "")
    [evaluated] = (tmp_path / "runs").glob("eval-*")
    texts = pq.read_table(evaluated / WHOLE).column("completion").to_pylist()
    assert texts and all({*text} <= {"4", "2"} for text in texts) and len({*texts}) > 2
