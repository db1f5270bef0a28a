"""The doctor names the cause of a mismatch that was planted, and shows every mistake of a set-up."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import main_rl
from analysis.doctor.__main__ import main
from analysis.doctor.bench import Bench, Sampling, in_one_process
from analysis.doctor.examine import Examined, examine
from analysis.doctor.findings import Say
from analysis.doctor.gap import Gap
from analysis.doctor.knobs import Price
from analysis.doctor.recipe_checks import check_recipe
from analysis.doctor.rescoring import try_temperatures
from analysis.doctor.setup_checks import (
    check_disk,
    check_memory,
    check_packages,
    check_shared_memory,
    check_temporary,
    find_version,
    read_pins,
)
from analysis.doctor.target import find_target
from analysis.doctor.trials import Toggle, Trial
from analysis.doctor.verdict import Facts, decide
from configs.schema import RLConfig
from core.errors import UserError
from core.types.samples import Sample
from data_prep.tiny_model import CHARACTERS, CHAT_TEMPLATE, END, PAD, ROLES, UNKNOWN
from driver.checks.explain import estimate_memory
from driver.load_recipe import load_recipe
from driver.rl.setup import prepare
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm_support.settings import engine_args
from unit_tests.helpers.examples import a_sample, run_here
from unit_tests.helpers.runs import ROOT
from unit_tests.helpers.small_trained import edit

PLANTED = Path(__file__).parents[1] / "helpers" / "planted_engines"
BEGIN = "<|begin|>"
SHARPER = 8
"""Factor of the logits: a random model's are so small that rounding them changes next to nothing."""
QUESTIONS = ["1+2=", "10+20=", "3+4=", "111+222="]
"""Of different lengths, so that a batch of them has padding."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sharp_path(tmp_path_factory, tiny_path) -> str:
    """The tiny model, less random, and its tokenizer of characters."""
    folder = tmp_path_factory.mktemp("sharp")
    save_sharper(AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32), folder)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pairs_path(tmp_path_factory) -> str:
    """A random model whose tokenizer has pairs of letters too, so that most of what it writes has other ids as text."""
    folder = tmp_path_factory.mktemp("pairs")
    tokenizer = tokenizer_of_pairs()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_sharper(LlamaForCausalLM(config), folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_sharper(model: LlamaForCausalLM, folder: Path) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPER)
    model.save_pretrained(folder)


def tokenizer_of_pairs() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.processors import TemplateProcessing

    specials = [PAD, END, UNKNOWN, BEGIN, *(f"<|{role}|>" for role in ROLES)]
    merges = [(a, b) for a in ascii_lowercase for b in ascii_lowercase]
    words = [*specials, *CHARACTERS, *("".join(pair) for pair in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, vocabulary[BEGIN])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def ask(recipe, tmp_path, sharp_path) -> Callable[..., Examined]:
    """Let the doctor compare an engine with the trainer; return what it found."""
    rows = [{"messages": question, "answer": "0"} for question in QUESTIONS]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def examined(
        engine: str = "hf", *, bound: float | None = None, say: Say = lambda _: None, **changes: object
    ) -> Examined:
        given = {"model.path": sharp_path, "data.train": str(data), "rollout.max_new_tokens": 16} | changes
        target = find_target(recipe(given | {"rollout.engine": engine}), [])
        sampling = Sampling(sequences=16, tokens=16, bound=bound)
        return examine(target, prepare(target.loaded), sampling, say)

    return examined


def closing(found: Examined) -> set[Toggle]:
    return {trial.toggle for trial in found.trials if trial.closes(found.facts.bound)}


@pytest.mark.parametrize(
    ("engine", "cause", "said"),
    [
        ("colder", Toggle.TEMPERATURE, "the engine samples at temperature 0.7 and the trainer scores at 1: gap"),
        *(
            pytest.param(*planted, marks=[pytest.mark.one_core, pytest.mark.slow])
            for planted in [
                ("rounded_head", Toggle.DTYPE, "the engine computes its head in bfloat16 and the trainer in float32"),
                ("stale_weights", Toggle.WEIGHTS, "the engine still samples from the weights before the last sync"),
                ("sees_padding", Toggle.BATCH, "depend on the other requests of the batch"),
                ("stale_prefixes", Toggle.PREFIX_CACHE, "prefix cache returns what is not of the current weights"),
            ]
        ),
    ],
    ids=lambda given: given if str(given).isidentifier() else "",
)
def test_a_planted_cause_is_named_and_no_other_toggle_closes_the_gap(ask, engine, cause, said):
    found = ask(str(PLANTED / f"{engine}.py"))
    assert (found.verdict.kind, found.verdict.cause) == ("cause", cause), found.verdict.sentence
    assert said in found.verdict.sentence
    assert closing(found) == {cause}
    if cause is Toggle.TEMPERATURE:
        assert {trial.toggle for trial in found.trials} == {*Toggle} - {Toggle.ROUTES}, "it has no routers"
        [batch] = [trial for trial in found.trials if trial.toggle is Toggle.BATCH]
        assert batch.before.tokens == batch.after.tokens < found.facts.second.tokens, "the same requests"
        assert batch.before.mean == pytest.approx(batch.after.mean, rel=1e-3)


@pytest.mark.one_core
@pytest.mark.slow
def test_routers_that_choose_other_experts_are_named_as_the_cause(ask, mixture_path):
    found = ask(str(PLANTED / "other_routes.py"), bound=1e-4, **{"model.path": mixture_path})
    assert found.verdict.cause is Toggle.ROUTES, found.verdict.sentence
    assert closing(found) == {Toggle.ROUTES}
    [trial] = [trial for trial in found.trials if trial.toggle is Toggle.ROUTES]
    assert trial.after.mean < 1e-5 < trial.before.mean


@pytest.mark.one_core
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("ids_of_text", "the ids that the engine returns are not those that it sampled"),
        ("prompt_of_text", "the engine tokenises the prompt, with the tokenizer's own special tokens, again"),
    ],
)
def test_text_that_is_tokenised_again_is_named(ask, pairs_path, engine, said):
    found = ask(str(PLANTED / f"{engine}.py"), **{"model.path": pairs_path})
    assert found.verdict.cause is Toggle.TOKENISED_AGAIN, found.verdict.sentence
    assert said in found.verdict.sentence
    assert closing(found) == {Toggle.TOKENISED_AGAIN}


@pytest.mark.one_core
@pytest.mark.slow
def test_tokens_drawn_at_another_temperature_than_they_claim_are_found(ask):
    found = ask(str(PLANTED / "colder_in_secret.py"))
    assert found.facts.second.mean < 1e-4 and found.facts.sigmas < -6
    assert found.verdict.cause is Toggle.TEMPERATURE
    fitted = float(found.verdict.sentence.split("at about temperature ")[1].split(",")[0])
    assert 0.55 < fitted < 0.85, "the planted one is 0.7"


def test_an_engine_without_a_mistake_has_no_mismatch(ask, pairs_path):
    said: list[str] = []
    found = ask(say=said.append, **{"model.path": pairs_path})
    assert found.verdict.kind == "none" and found.verdict.cause is None and found.trials == []
    assert found.verdict.sentence.startswith("no mismatch: ")
    assert found.facts.second.mean < 1e-4 < 25 * found.facts.bound <= found.facts.moved
    assert found.facts.changed > 8, "ids that text would not have are no mismatch"
    first, *gaps, rest, last = said
    assert first.startswith("\nengine hf and the local trainer in this process, float32, temperature 1; 16 sequences")
    assert [line.partition("mean")[0].strip() for line in gaps] == ["after the first sync", "after an update"]
    assert (rest, last) == (found.facts.describe_rest(), f"\n{found.verdict.sentence}")


@pytest.mark.one_core
@pytest.mark.slow
def test_two_mistakes_are_not_taken_for_one_of_them(ask):
    found = ask(str(PLANTED / "two_mistakes.py"))
    assert (found.verdict.kind, found.verdict.cause) == ("unknown", None)
    assert "no single toggle closes the gap; the largest part goes where" in found.verdict.sentence
    assert closing(found) == set()


def test_an_engine_that_takes_no_weights_from_its_own_process_is_refused(ask):
    with pytest.raises(UserError, match="this engine does not run in the trainer's process, and the doctor"):
        ask(str(PLANTED / "remote_only.py"))


def a_gap(mean: float) -> Gap:
    return Gap(mean=mean, p99=mean, largest=mean, kl=0.0, tokens=64)


def some_facts(**changes: object) -> Facts:
    usual = {"bound": 0.002, "first": a_gap(1e-6), "second": a_gap(1e-6), "moved": 0.1, "changed": 0, "sequences": 4}
    return Facts(**usual | {"fingerprint": None, "surprise": 0.0, "sigmas": 0.0} | changes)


def a_trial(toggle: Toggle, after: float, before: float = 0.3) -> Trial:
    return Trial(toggle=toggle, change=f"{toggle} off", before=a_gap(before), after=a_gap(after), means="so it is")


def test_the_first_toggle_that_closes_the_gap_is_the_cause():
    trials = [a_trial(Toggle.DTYPE, 0.2), a_trial(Toggle.WEIGHTS, 1e-3), a_trial(Toggle.WEIGHTS, 1e-5)]
    found = decide(
        some_facts(second=a_gap(0.3)), [*trials, a_trial(Toggle.PREFIX_CACHE, 1e-6)], temperature=1.0, fitted=None
    )
    assert found.cause is Toggle.WEIGHTS
    said = (
        "cause: so it is: gap 0.3 nats -> 1e-05 nats (weights off); it also closes with prefix cache, which says less"
    )
    assert found.sentence == said


def test_the_json_of_an_examination_is_json_where_a_gap_is_no_number():
    facts, trials = some_facts(second=a_gap(math.nan)), [a_trial(Toggle.DTYPE, math.inf)]
    verdict = decide(facts, trials, temperature=1.0, fitted=None)
    found = Examined(verdict=verdict, facts=facts, trials=trials, about={}).to_json()
    read = json.loads(json.dumps(found), parse_constant=lambda name: pytest.fail(f"JSON has no {name}"))
    assert read["second"]["mean"] is read["trials"][0]["after"]["mean"] is None and read["verdict"] != "none"
    price = Price(knob="none", gap=a_gap(math.inf), changed=0.0, tokens_per_s=1.0, memory_gib=1.0).to_json()
    assert price["gap"]["mean"] is None and price["tokens_per_s"] == 1.0


def test_the_json_of_an_examination_holds_its_facts_and_every_trial():
    facts, trials = some_facts(second=a_gap(0.3), changed=1), [a_trial(Toggle.DTYPE, 0.2), a_trial(Toggle.BATCH, 1e-5)]
    verdict = decide(facts, trials, temperature=1.0, fitted=None)
    found = Examined(verdict=verdict, facts=facts, trials=trials, about={"engine": "hf"}).to_json()
    gaps = {mean: {"mean": mean, "p99": mean, "largest": mean, "kl": 0.0, "tokens": 64} for mean in (0.3, 0.2, 1e-5)}
    assert json.loads(json.dumps(found["trials"])) == [
        {"toggle": "dtype", "change": "dtype off", "before": gaps[0.3], "after": gaps[0.2], "closes": False},
        {"toggle": "batch", "change": "batch off", "before": gaps[0.3], "after": gaps[1e-5], "closes": True},
    ]
    assert (found["engine"], found["second"], found["changed"]) == ("hf", gaps[0.3], 1)
    assert (found["verdict"], found["cause"], found["sentence"]) == ("cause", "batch", verdict.sentence)


def test_a_small_gap_that_becomes_a_little_smaller_is_not_closed():
    assert not a_trial(Toggle.BATCH, 0.0019, before=0.0021).closes(0.002)
    assert a_trial(Toggle.BATCH, 0.0006, before=0.0021).closes(0.002)
    assert not a_trial(Toggle.BATCH, 1e-6, before=1e-4).closes(0.002), "there was no gap"


def test_nan_is_a_gap():
    nan = float("nan")
    trials = [a_trial(Toggle.BATCH, nan, before=nan), a_trial(Toggle.DTYPE, 1e-5, before=nan)]
    assert decide(some_facts(second=a_gap(nan)), trials, temperature=1.0, fitted=None).cause is Toggle.DTYPE
    found = decide(some_facts(second=a_gap(nan)), trials[:1], temperature=1.0, fitted=None)
    assert found.kind == "unknown" and "gap nan nats -> nan nats" in found.sentence
    assert decide(some_facts(first=a_gap(nan)), [], temperature=1.0, fitted=None).cause is Toggle.WEIGHTS


def test_what_was_measured_before_any_toggle_may_be_the_cause():
    lost = decide(some_facts(first=a_gap(0.3)), [], temperature=1.0, fitted=None)
    assert lost.cause is Toggle.WEIGHTS and "the first sync of the weights was lost" in lost.sentence
    other = decide(some_facts(fingerprint="rank 0 did not load a"), [], temperature=1.0, fitted=None)
    assert other.cause is Toggle.WEIGHTS and "rank 0 did not load a" in other.sentence
    drawn = decide(some_facts(surprise=-0.2, sigmas=-9.0), [], temperature=1.0, fitted=0.7)
    assert drawn.cause is Toggle.TEMPERATURE and "0.2 nats less surprising" in drawn.sentence
    cut = decide(some_facts(surprise=-0.2, sigmas=-9.0), [], temperature=1.0, fitted=1.0)
    assert "draws its tokens not from the whole distribution" in cut.sentence and "about" not in cut.sentence
    assert decide(some_facts(), [], temperature=1.0, fitted=None).kind == "none"


def test_what_is_known_of_the_model_is_said_where_no_toggle_closes_the_gap():
    facts, trials = some_facts(second=a_gap(0.3)), [a_trial(Toggle.BATCH, 0.2)]
    found = decide(facts, trials, temperature=1.0, fitted=None, hints="the head is tied")
    assert found.kind == "unknown" and found.sentence.endswith("; the head is tied")
    closed = decide(facts, [a_trial(Toggle.BATCH, 0.0)], temperature=1.0, fitted=None, hints="the head is tied")
    assert "the head is tied" not in closed.sentence


@pytest.mark.parametrize("true", [1.0, 0.7])
def test_a_temperature_is_tried_only_if_it_is_another_than_the_runs(true):
    rng = random.Random(0)
    samples = [replace(s, rollout_logp=s.rollout_logp / true) for s in (a_sample(rng) for _ in range(3))]

    def score(given: list[Sample], compute: partial) -> list[Sample]:
        return [
            replace(s, columns={"prox_logp": s.rollout_logp * true / compute.keywords["temperature"]}) for s in given
        ]

    usual = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
    bench = SimpleNamespace(cfg=usual, score=score, run_model=print)
    assert [t.change for t in try_temperatures(bench, samples, a_gap(0.3))] == (
        [] if true == 1.0 else ["scored at temperature 0.7 instead of 1"]
    )


@pytest.mark.one_core
@pytest.mark.slow
def test_a_head_that_only_the_config_ties_is_named(ask, sharp_path, tmp_path):
    base = Path(shutil.copytree(sharp_path, tmp_path / "base"))
    edit(base / "config.json", tie_word_embeddings=True)
    found = ask(str(PLANTED / "follows_config.py"), **{"model.path": str(base)})
    assert found.verdict.kind == "unknown", found.verdict.sentence
    assert "the head is tied in the config and not in the file" in found.verdict.sentence
    assert not any("temperature 1 instead of 1" in trial.change for trial in found.trials)


@pytest.mark.one_core
@pytest.mark.slow
def test_the_rounding_of_bfloat16_is_named_where_it_is_asked_for(ask):
    usual = ask(**{"model.dtype": "bfloat16"})
    assert usual.verdict.kind == "none" and usual.facts.second.mean > 1e-3
    found = ask(bound=1e-4, **{"model.dtype": "bfloat16"})
    assert "round differently in model.dtype=bfloat16" in found.verdict.sentence


@pytest.mark.one_core
@pytest.mark.slow
def test_an_adapter_is_moved_and_sent_like_weights(ask):
    found = ask(str(PLANTED / "stale_weights.py"), **{"model.lora": {"r": 4}})
    assert found.verdict.cause is Toggle.WEIGHTS, found.verdict.sentence


def test_a_run_is_examined_with_its_newest_checkpoint(recipe, tmp_path, capsys):
    code, said = run_here(main_rl, "--config", recipe({"checkpoint.every": 1}))
    assert code == 0, said
    [run] = (tmp_path / "runs").iterdir()
    target = find_target(str(run), [])
    assert target.checkpoint is not None and target.checkpoint.name == "step_00002"
    bench = Bench(target, prepare(target.loaded), Sampling(sequences=4, tokens=2))
    saved = torch.load(target.checkpoint / "policy" / "state.pt")["weights"]
    assert all(torch.equal(a, b) for a, b in zip(bench.copy_weights(), saved, strict=True))
    capsys.readouterr()
    assert main([str(run), "--json", "--sequences", "4", "--tokens", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "the checkpoint after step 2" in report["target"]
    assert report["mismatch"]["verdict"] == "none" and report["mismatch"]["cause"] is None
    assert {finding["level"] for finding in report["setup"]} <= {"ok", "warning"}


def test_every_mistake_of_a_recipe_is_shown(recipe, tmp_path, capsys):
    reward = tmp_path / "broken.py"
    reward.write_text("def score(prompt, messages):\n    raise RuntimeError('no sandbox')\n")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": "1+1=", "answer": "2"}\n{"messages": "", "answer": "2"}\n')
    changes = {"reward.function": str(reward), "save_to": "models", "device": "cuda"}
    path = recipe({**changes, "data.train": str(data), "data.max_invalid_fraction": 0.9, "data.eval": "nowhere.jsonl"})
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.txt").touch()
    assert main([path, f"save_to={tmp_path / 'models'}", "--setup"]) == 1
    lines = capsys.readouterr().out.splitlines()
    errors = [line for line in lines if line.startswith("error")]
    assert [line.split()[1] for line in errors] == ["devices", "folders", "data.eval", "reward"]
    assert "no sandbox" in errors[-1] and "mine.txt" in errors[1]
    [warned] = [line for line in lines if line.startswith("warning") and "data.train" in line]
    assert "1 rows; data.train: " in warned and "1 empty" in warned
    assert lines[-1].startswith("set-up: 4 errors, ")


def test_a_model_that_is_not_there_is_one_error(recipe):
    findings, _ = check_recipe(find_target(recipe({"model.path": "models/missing"}), []).loaded, lambda _: None)
    assert [f.check for f in findings if f.level == "error"] == ["model"]


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        ({"model.lora": {"r": 4096}}, "model", "model.lora.r=4096 is above"),
        (
            {"rollout.max_new_tokens": 100_000, "trainer.micro_batch_tokens": 200_000},
            "model",
            "one sample may reach 100032 tokens",
        ),
        ({"push_to": "mine/model"}, "folders", "push_to=mine/model"),
        ({"run_dir": "/proc/nowhere"}, "folders", "/proc/nowhere"),
    ],
)
def test_what_a_run_refuses_the_doctor_refuses(changes, check, said, recipe):
    path = recipe(changes)
    findings, _ = check_recipe(find_target(path, []).loaded, lambda _: None)
    [refused] = [f.found for f in findings if f.check == check and f.level == "error"]
    code, err = run_here(main_rl, "--config", path)
    assert code == 2 and said in refused and said in err


def test_a_check_that_only_the_program_makes_is_not_missing(recipe):
    target = find_target(recipe({"group_size": 1}), [])
    findings, prepared = check_recipe(target.loaded, lambda _: None)
    assert prepared is None and findings[-1].check == "recipe" and "group_size is 1" in findings[-1].found


def test_a_supervised_recipe_is_checked_and_starts_nothing(recipe, capsys):
    assert main([recipe(kind="sl")]) == 0
    said = capsys.readouterr().out
    assert "data.train    15 rows" in said and "reward" not in said and "nats" not in said


def test_one_process_has_one_engine_and_one_rank(recipe):
    several = {"backend": "ray", "rollout.num_engines": 2, "trainer.ranks": 2, "trainer.sequence_parallel": 2}
    several["weight_sync.transport"] = "direct"
    cfg = in_one_process(load_recipe(RLConfig, recipe(several), []).cfg)
    assert RLConfig.model_validate(cfg.model_dump()) == cfg
    assert (cfg.backend, cfg.trainer.ranks, cfg.rollout.num_engines) == ("local", 1, 1)


def test_what_is_neither_recipe_nor_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no run folder, it has no config"):
        find_target(str(tmp_path), [])
    with pytest.raises(UserError, match="there is no such file"):
        find_target(str(tmp_path / "missing.yaml"), [])


def test_versions_are_compared_with_the_lock():
    pins = read_pins((ROOT / "constraints.txt").read_text())
    assert [f.level for f in check_packages(pins, ["torch", "transformers"])] == ["ok"]
    [older] = check_packages(pins | {"torch": "1.0"}, ["torch"])
    assert older.level == "warning" and f"torch is {find_version('torch')}, and 1.0 was tested" in older.found
    [missing] = check_packages(pins, ["no-such-package"])
    assert missing.level == "error" and "make install" in missing.found


def test_memory_and_disk_are_compared_with_what_the_run_will_take(recipe, tmp_path):
    target = find_target(recipe({"checkpoint.every": 1, "checkpoint.keep": 3}), [])
    cfg, estimate = target.loaded.cfg, estimate_memory(target.loaded)
    n = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(cfg.model.path).parameters())
    assert estimate.per_rank == pytest.approx(n * (4 + 4 + 8) / 2**30)  # weights, gradients, two moments of AdamW
    assert estimate.checkpoint == pytest.approx(n * (4 + 8) / 2**30)
    wanted = estimate.per_rank + estimate.per_engine
    levels = [check_memory(cfg, estimate, total_gib=wanted * share).level for share in (2, 1.1, 0.9)]
    assert levels == ["ok", "warning", "error"]
    for given, cache_gib in (({}, 1.0), ({"rollout.kv_cache_gib": 0.25}, 0.25)):
        on_vllm = find_target(recipe({"backend": "ray", "rollout.engine": "vllm"} | given), []).loaded.cfg
        found = check_memory(on_vllm, estimate, total_gib=9.0).found
        assert found.startswith(f"about {wanted + cache_gib:.2f} GiB")
    assert check_disk(cfg, estimate).level == "ok"
    # 3 to keep, the best one, and one that is being written
    huge = check_disk(cfg, replace(estimate, checkpoint=1e6))
    assert huge.level == "error" and "checkpoints 5000000.00" in huge.found and "checkpoint.keep" in huge.found
    assert check_temporary(tmp_path).level == "ok"


def test_shared_memory_is_looked_at_where_there_are_processes(recipe, tmp_path):
    one = find_target(recipe(), []).loaded.cfg
    assert check_shared_memory(one, tmp_path / "missing").found == "not used by one process"
    several = one.model_copy(update={"backend": "ray"})
    assert check_shared_memory(several, tmp_path / "missing").level == "error"
    assert check_shared_memory(several, tmp_path).level == "ok"


@pytest.mark.one_core
@pytest.mark.slow
def test_the_trainers_weights_are_moved_until_old_ones_can_be_told_apart(ask):
    """And the move is as large as the bound asks for, no smaller."""
    close, far = ask(bound=1e-3), ask(bound=1e-2)
    assert 0.025 <= close.facts.moved < far.facts.moved and far.facts.moved >= 0.25


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_vllm_has_no_mismatch_and_every_toggle_can_be_tried_on_it(ask):
    settings = {"rollout.kv_cache_gib": 0.1}
    clean = ask("vllm", **settings)
    assert clean.verdict.kind == "none", clean.verdict.sentence
    tried = ask("vllm", bound=1e-9, **settings)
    # the temperature that fits is the run's own, so it is no other; and the model has no routers
    without = {Toggle.TOKENISED_AGAIN, Toggle.TEMPERATURE, Toggle.ROUTES}
    assert {trial.toggle for trial in tried.trials} >= {*Toggle} - without
    assert tried.facts.second.mean < 1e-3


def test_vllm_can_be_told_to_keep_no_prefixes(tiny_path):
    config = EngineConfig(model_path=tiny_path, temperature=1.0, max_model_len=8, stop_token_ids=())
    kept = [engine_args(replace(config, prefix_cache=keep), on_cpu=True) for keep in (True, False)]
    assert [args["enable_prefix_caching"] for args in kept] == [True, False]
