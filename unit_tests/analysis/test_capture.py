"""Snapshots, compared losses and replay, on made-up groups with the real trainer in this process and no engine."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from algs import load_algorithm
from algs.ops import k2
from analysis.capture import recompute, weights
from analysis.capture.batch_file import read_batch, write_batch
from analysis.capture.gradient import compute_update, inner
from analysis.capture.pieces import PieceDecoder
from analysis.capture.replay import main as replay_main
from analysis.capture.snapshot import read_snapshot
from analysis.capture.table import MEANINGS
from analysis.capture.tokens import (
    MANIFEST,
    TOKEN_COLUMNS,
    CapturedSample,
    captured_steps,
    read_captured,
    snapshot_folder,
    write_captured,
)
from analysis.capture.triggers import HISTORY, LEAST, Triggers
from configs.capture_schema import CaptureConfig
from configs.schema import RLConfig
from core.errors import RunStopped, UserError
from core.metrics import find_metric
from core.types.samples import Group
from data_feeds.packing.batches import plan_update
from data_feeds.packing.columns import add_columns
from driver.load_recipe import load_recipe
from unit_tests.helpers.captured_step import NO_MASK, WRONG_SIGN, Step, rewarded
from unit_tests.helpers.examples import a_changed, some_groups, with_values
from unit_tests.helpers.runs import file_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def step(recipe, tmp_path):
    def make(changes: dict | None = None, *overrides: str) -> Step:
        return Step(recipe({"rollout.max_new_tokens": 24} | (changes or {})), tmp_path / "run", *overrides)

    return make


def moved(groups: list[Group], by: float = 0.5) -> list[Group]:
    """Groups whose engine is off the trainer by chance, and not by more than a clip bound or two."""
    rng = random.Random(5)
    noise = {id(s): np.array([rng.gauss(0, by) for _ in s.action_mask]) * s.action_mask for g in groups for s in g}
    return [[a_changed(s, rollout_logp=s.rollout_logp + noise[id(s)]) for s in g] for g in groups]


# ---------------------------------------------------------------- what is on the disk


def test_captured_tokens_come_back_as_they_were(tmp_path):
    folder = snapshot_folder(tmp_path, 7)
    folder.mkdir(parents=True)
    nan = float("nan")
    samples = [
        CapturedSample(
            step=7,
            group=g,
            sample=i,
            reward=nan if i else 0.5,
            pieces=["<b>", "é", ""][: 2 + i],
            columns={name: np.array([nan, 0.1, -1e30][: 2 + i], dtype=np.float32) for name in ("logp", "loss")},
        )
        for g in range(2)
        for i in range(2)
    ]
    write_captured(folder, samples)
    assert captured_steps(tmp_path) == []
    with pytest.raises(UserError, match="no complete snapshot of step 7"):
        read_captured(tmp_path, 7)
    (folder / MANIFEST).write_text("{}")
    assert captured_steps(tmp_path) == [7]
    again = read_captured(tmp_path, 7)
    for one, other in zip(samples, again, strict=True):
        assert (one.group, one.sample, one.pieces) == (other.group, other.sample, other.pieces)
        assert one.reward == other.reward or (np.isnan(one.reward) and np.isnan(other.reward))
        for name, column in one.columns.items():
            assert np.array_equal(column, other.columns[name], equal_nan=True) and column.dtype == np.float32
    (folder / "tokens.npz").write_bytes((folder / "tokens.npz").read_bytes()[:-30])
    with pytest.raises(UserError, match="is damaged"):
        read_captured(tmp_path, 7)


def test_the_batch_comes_back_as_it_was(tmp_path):
    groups = with_values(some_groups(3, 2))
    groups[1][0] = replace(groups[1][0], reward=None, failure="timeout", columns={}, advantage=None)
    groups[2][1] = replace(groups[2][1], excluded=np.ones_like(groups[2][1].action_mask), stop="length")
    write_batch(tmp_path, groups)
    assert read_batch(tmp_path) == groups


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, as the byte-level ones fall back to."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words with a mark for the space, whose decoder drops a space at the beginning."""
    plain = Tokenizer(models.WordLevel({"a": 0, "▁hello": 1, "▁world": 2, "!": 3}, unk_token="!"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def test_the_pieces_of_a_text_are_the_text(tiny_path):
    tokenizer = bytes_tokenizer()
    text = "aé 🙂b\n漢字 <img>"
    ids = tokenizer.encode(text)
    pieces = PieceDecoder(tokenizer).decode(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert pieces[:4] == ["a", "", "é", " "], "a character stands at its last token"
    assert "".join(PieceDecoder(tokenizer).decode(ids[:-12])).startswith("aé 🙂b")
    assert "".join(PieceDecoder(tokenizer).decode(ids[:2])) == "a\ufffd", "an end in the middle of a character is shown"
    assert PieceDecoder(words_tokenizer()).decode([1, 2, 3]) == [" hello", " world", "!"]
    tiny = AutoTokenizer.from_pretrained(tiny_path)
    assert "".join(PieceDecoder(tiny).decode(tiny.encode("3+4="))) == tiny.decode(tiny.encode("3+4="))


def test_a_piece_is_the_text_of_its_token():
    tokenizer = bytes_tokenizer()
    rows = {"ab": ["a", "b"], "é!": ["", "é", "!"], "a🙂": ["a", "", "", "", "🙂"]}
    for text, pieces in rows.items():
        assert PieceDecoder(tokenizer).decode(tokenizer.encode(text)) == pieces
    [_, after] = tokenizer.encode("À")
    # no character has that many bytes
    broken = [*[""] * 7, "\ufffd" * 8, "\ufffd"]
    assert PieceDecoder(tokenizer).decode([after] * 9) == broken, "shown as they are"


# ---------------------------------------------------------------- what is kept


def test_a_run_without_capture_keeps_nothing(step):
    made = step()
    made.train(rewarded(some_groups(4)))
    assert not made.run.observers.observers and not made.home.exists()
    assert [*made.trainer.observers.by_key] == ["metrics", "utilization"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_snapshot_holds_what_the_step_was_made_of(step, updates):
    groups = moved(rewarded(some_groups(4)))
    groups[1][1] = replace(groups[1][1], reward=None, failure="timeout")
    made = step({"updates_per_step": updates, "alg.kl": {"coef": 0.01}, "alg.entropy_coef": 0.01, "capture.every": 3})
    with_it = made.train(groups)
    plain = step({"updates_per_step": updates, "alg.kl": {"coef": 0.01}, "alg.entropy_coef": 0.01})
    assert plain.train(groups) == with_it, "keeping a step changes no number"
    assert torch.equal(plain.trainer.flatten_weights(), made.trainer.flatten_weights())
    assert captured_steps(made.home) == [0]
    captured = read_captured(made.home, 0)
    assert [(c.group, c.sample) for c in captured] == [(g, i) for g in range(4) for i in range(3)]
    assert set(captured[0].columns) == set(TOKEN_COLUMNS)
    for c, s in zip(captured, (s for g in groups for s in g), strict=True):
        there = {name: ~np.isnan(column) for name, column in c.columns.items()}
        assert all(np.array_equal(mask, s.loss_mask) for mask in there.values())
        assert len(c.pieces) == len(s.token_ids) and (c.reward == s.reward or s.reward is None)
        seen = c.columns
        assert np.array_equal(seen["rollout_logp"][s.loss_mask], s.rollout_logp[s.loss_mask])
        gap = seen["logp"] - seen["rollout_logp"]
        assert np.allclose(seen["logp_difference"], gap, equal_nan=True)
    manifest = read_snapshot(snapshot_folder(made.home, 0)).manifest
    assert len(manifest.updates) == updates and manifest.version == 0
    norms = [u.grad_norm for u in manifest.updates]
    assert sum(norms) / updates == pytest.approx(with_it["train/grad_norm"], rel=1e-12)
    total = np.concatenate([c.columns["weight"] for c in captured]).astype(np.float64)
    loss = np.concatenate([c.columns["loss"] for c in captured]).astype(np.float64)
    assert np.nansum(total * loss) / np.nansum(total) == pytest.approx(with_it["train/loss"], abs=1e-12)
    if updates == 1:
        ratios = np.concatenate([c.columns["ratio"] for c in captured])
        assert np.nanmin(ratios) == np.nanmax(ratios) == 1
        assert manifest.updates[0].loss == pytest.approx(with_it["train/loss"], abs=1e-12)


def test_steps_are_kept_by_their_number(step):
    made = step({"capture.every": 2})
    for n in range(3):
        made.train(rewarded(some_groups(4, seed=n)))
    assert captured_steps(made.home) == [0, 2] and made.run.steps_done == 3
    kept = {n: f"{snapshot_folder(made.home, n)} (every: step {n}, capture.every=2)" for n in (0, 2)}
    assert made.said == [f"step {n} is kept in {where}" for n, where in kept.items()]
    assert read_snapshot(snapshot_folder(made.home, 2)).manifest.version == 2


def test_on_is_a_word_in_yaml(recipe):
    path = Path(recipe())
    path.write_text(path.read_text() + "\ncapture: {every: 5, on: [kl, non_finite]}\n")
    assert load_recipe(RLConfig, str(path), []).cfg.capture.on == ["kl", "non_finite"]
    with pytest.raises(UserError, match=r"capture.on.0='loss' is not valid"):
        load_recipe(RLConfig, str(path), ["capture.on=[loss]"])


def test_events_say_what_happened():
    triggers = Triggers(CaptureConfig(on=["kl", "grad_norm", "non_finite"], kl_above=0.2, grad_norm_times=3))
    for _ in range(LEAST - 1):
        assert (
            triggers.find_event({"train/grad_norm": 1.0, "train/mismatch/kl": 0.1, "train/updates_skipped": 0.0}) == ""
        )
    assert triggers.find_event({"train/grad_norm": 99.0}) == "", "compared with fewer steps than say what is usual"
    assert triggers.find_event({"train/grad_norm": 2.9}) == ""
    assert triggers.find_event({"train/grad_norm": 3.1}).startswith("grad_norm: train/grad_norm is 3.1, more than")
    assert triggers.find_event({"train/mismatch/kl": 0.3}) == "kl: train/mismatch/kl is 0.3, above capture.kl_above=0.2"
    assert triggers.find_event({"train/approx_kl": 0.3}).startswith("kl: train/approx_kl")
    assert triggers.find_event({"train/updates_skipped": 1.0}).startswith("non_finite: 1 updates")
    off = Triggers(CaptureConfig(every=1))
    assert off.find_event({"train/updates_skipped": 1.0, "train/mismatch/kl": 9.0}) == ""
    assert HISTORY >= LEAST


def test_events_keep_their_steps_and_no_more_than_allowed(step):
    made = step({"capture": {"on": ["kl"], "kl_above": 0.05, "most": 2, "weights": True}})
    near = rewarded(some_groups(4))
    scored = made.trainer.compute_columns(plan_update(near, "token", 10_000).batches()[0], frozenset({"prox_logp"}))
    plan = plan_update(near, "token", 10_000)
    filled = add_columns(plan, [scored])
    fresh = [[a_changed(s, rollout_logp=filled[id(s)].columns["prox_logp"]) for s in g] for g in near]
    made.train(fresh)
    assert captured_steps(made.home) == [] and not snapshot_folder(made.home, 0).exists()
    for n in range(4):
        made.train(moved(rewarded(some_groups(4, seed=n)), by=2.0))
    assert captured_steps(made.home) == [1, 2], "capture.most=2"
    assert read_snapshot(snapshot_folder(made.home, 1)).manifest.reason.startswith("kl: train/mismatch/kl is ")


HICCUP = """
import torch
from algs.grpo import GRPO

class Hiccup(GRPO):
    def loss(self, policy, tokens):
        loss, metrics = super().loss(policy, tokens)
        return loss * torch.where(tokens.advantage > 0, torch.inf, 1.0), metrics
"""


@pytest.mark.parametrize("most", [1, 3])
def test_a_step_that_is_not_finite_is_kept_though_it_ends_the_run(step, tmp_path, most):
    file = file_of(tmp_path / "hiccup.py", HICCUP)
    made = step({"alg": {"file": file}, "capture.on": ["non_finite"], "trainer.max_skipped_updates": most})
    ends = pytest.raises(RunStopped, match="1 updates in a row") if most == 1 else nullcontext()
    with ends:
        made.train(rewarded(some_groups(4)))
    assert captured_steps(made.home) == [0]
    said = [line.partition(" (")[0] for line in made.said]
    assert said == [f"step 0 is kept in {snapshot_folder(made.home, 0)}"], "it is told, and before the run ends"
    snapshot = read_snapshot(snapshot_folder(made.home, 0))
    assert snapshot.manifest.reason.startswith("non_finite: ") and snapshot.manifest.updates[0].grad_norm is None
    Path(file).unlink()  # the snapshot has a copy
    found = recompute.replay(snapshot.folder, [])
    assert found.is_reproduced is None and not np.isfinite(found.recomputed["grad_norm"])


# ---------------------------------------------------------------- replay


@pytest.mark.parametrize(
    "changes",
    [
        {"alg": {"name": "grpo", "kl": {"coef": 0.1}, "entropy_coef": 0.01}},
        {"alg": {"name": "gspo"}, "updates_per_step": 2},
        {"alg": {"name": "p3o"}},
        {"alg": {"name": "ppo"}},
        {"alg": {"name": "grpo", "overlong": {"mode": "filter"}}, "model.lora": {"r": 4}},
        {"model.dtype": "bfloat16"},
    ],
    ids=["kl", "gspo", "p3o", "ppo", "lora", "bfloat16"],
)
def test_replay_reproduces_the_run_to_the_last_digits(step, changes):
    made = step(changes | {"capture": {"every": 1, "weights": True}, "trainer.micro_batch_tokens": 60})
    made.train(moved(rewarded(some_groups(4))))
    metrics = made.train(moved(rewarded(some_groups(4, seed=1))))
    folder = snapshot_folder(made.home, 1)
    updates = made.cfg.updates_per_step
    found = [recompute.replay(folder, [], update=u) for u in range(updates)]
    exact = 1e-6 if made.cfg.model.dtype == "float32" else 1e-4
    assert all(f.difference is not None and f.difference <= exact for f in found), found
    assert all(f.is_reproduced for f in found)
    assert sum(f.recomputed["grad_norm"] for f in found) / updates == pytest.approx(
        metrics["train/grad_norm"], rel=exact
    )
    if updates == 1:
        assert found[0].recomputed["loss"] == pytest.approx(metrics["train/loss"], abs=exact)
    assert found[-1].losses[0].cosine == pytest.approx(1.0)


def test_a_step_with_an_update_that_is_not_made_is_replayed(step):
    """ScaleRL leaves out groups of equal rewards; here three of four, and one update has no other."""
    made = step({"alg": {"name": "scalerl"}, "updates_per_step": 2, "capture": {"every": 1, "weights": True}})
    teaches = rewarded(some_groups(4))[2]
    equal = [[a_changed(s, reward=0.0, advantage=None) for s in g] for g in some_groups(4)]
    metrics = made.train(moved([*equal[:2], teaches, equal[3]]))
    [*captured] = read_captured(made.home, 0)
    assert [s.reward for s in captured] == [s.reward for s in teaches] + [0.0] * (len(captured) - len(teaches))
    found = recompute.replay(snapshot_folder(made.home, 0), [], update=0)
    assert found.is_reproduced and found.recomputed["loss"] == pytest.approx(metrics["train/loss"], abs=1e-6)
    assert metrics["train/updates_skipped"] == 1


def test_a_number_that_is_not_finite_is_not_reproduced():
    nan = float("nan")
    assert (
        recompute.measure_difference(1.0, nan, 2.0, 2.0) == recompute.measure_difference(1.0, 1.0, 2.0, nan) == np.inf
    )
    assert recompute.measure_difference(nan, 1.0, 2.0, 2.0) is None


def test_a_step_of_ranks_that_slice_their_rows_is_replayed(step):
    made = step({"capture": {"every": 1, "weights": True}})
    made.train(rewarded(some_groups(4)))
    folder = snapshot_folder(made.home, 0)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["run"]["trainer"] |= {"ranks": 2, "sequence_parallel": 2}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert recompute.replay(folder, []).is_reproduced


def test_a_replay_chooses_the_experts_of_the_run(step, mixture_path):
    given = {"model.path": mixture_path, "rollout.router_replay": "replay"}
    made = step(given | {"capture": {"every": 1, "weights": True}})
    blocks, k = len(made.trainer.routes.hook.blocks), made.trainer.routes.hook.k
    rng = np.random.default_rng(0)

    def routed(s):
        return replace(s, routes=rng.random((len(s.token_ids), blocks, 4)).argsort(-1)[..., :k].astype(np.uint8))

    made.train([[routed(s) for s in g] for g in rewarded(some_groups(4))])
    assert recompute.replay(snapshot_folder(made.home, 0), []).is_reproduced


def test_a_loss_of_sequences_is_compared_on_whole_episodes(step):
    made = step({"capture": {"every": 1, "weights": True}})
    groups = [[a_changed(s, reward=float(i == 2)) for i, s in enumerate(g)] for g in rewarded(some_groups(4))]
    made.train([[replace(s, episode=i // 2) for i, s in enumerate(g)] for g in groups])
    found = recompute.replay(snapshot_folder(made.home, 0), ["gspo"])
    assert found.is_reproduced and [row.name for row in found.losses] == ["run", "gspo"]
    assert found.losses[1].grad_norm > 0


@pytest.fixture
def compared(step, tmp_path) -> recompute.Replay:
    """One step of GRPO with two updates, whose second is beyond some clip bounds, and other losses on the second."""
    made = step(
        {"updates_per_step": 2, "trainer.lr": 0.1, "trainer.optimizer": "sgd", "trainer.max_grad_norm": 0.0}
        | {"capture": {"every": 1, "weights": True}, "alg": {"name": "grpo", "clip_low": 0.01, "clip_high": 0.01}}
    )
    rng = random.Random(3)
    groups = [[a_changed(s, reward=rng.random()) for s in g] for g in rewarded(some_groups(6, 4, seed=2))]
    groups[3] = [replace(s) for s in groups[0]]  # in both updates
    groups = [[replace(s, stop="length") if i == 1 else s for i, s in enumerate(g)] for g in groups]
    made.train(groups)
    losses = [
        {"as": "same", "name": "grpo", "clip_low": 0.01, "clip_high": 0.01},
        {"as": "dr_grpo", "name": "grpo", "loss_norm": "constant", "clip_low": 0.01, "clip_high": 0.01},
        {"as": "published", "name": "grpo", "loss_norm": "sequence", "scale_rewards": "group"},
        "cispo",
        file_of(tmp_path / "wrong_sign.py", WRONG_SIGN),
        file_of(tmp_path / "no_mask.py", NO_MASK),
        {"as": "whole", "name": "grpo", "clip_low": 0.01, "clip_high": 0.01, "overlong": {"mode": "filter"}},
    ]
    return recompute.replay(snapshot_folder(made.home, 0), losses, update=1)


def test_the_table_tells_losses_apart(compared):
    rows = {row.name: row for row in compared.losses}
    assert list(rows) == ["run", "same", "dr_grpo", "published", "cispo", "wrong_sign", "no_mask", "whole"]
    same = rows["same"]
    assert same.cosine == pytest.approx(1.0, abs=1e-12) and same.opposite == same.one_silent == 0
    assert (same.loss, same.grad_norm) == (rows["run"].loss, rows["run"].grad_norm)
    assert rows["run"].clipped and rows["run"].silent >= rows["run"].clipped
    dr = rows["dr_grpo"]
    assert dr.opposite == 0 and dr.one_silent == 0 and dr.cosine == pytest.approx(1.0), "the same direction"
    assert dr.grad_norm < 0.7 * same.grad_norm, "and another length, because it divides by the budget"
    published = rows["published"]
    assert published.opposite == 0 and 0.5 < cast(float, published.cosine) < 0.999, "other weights, no other sign"
    cispo = rows["cispo"]
    assert cispo.opposite == 0 and cispo.one_silent == pytest.approx(rows["run"].silent), "it drops no token"
    wrong = rows["wrong_sign"]
    assert wrong.opposite > 0.3 and cast(float, wrong.cosine) < 0.5
    no_mask = rows["no_mask"]
    assert no_mask.opposite == 0 and no_mask.one_silent > 0 and no_mask.silent == 0 and no_mask.clipped is None
    whole = rows["whole"]
    assert whole.opposite == 0 and whole.one_silent > 0.1, "the tokens that only the run's loss trains on count too"
    assert {"embed_tokens", "layers.0", "layers.1", "norm"} <= set(wrong.layers)
    assert list(wrong.layers.values()) == sorted(wrong.layers.values())


def test_the_first_order_change_of_the_kl_is_its_slope(step):
    """Worked out by a short step along the gradient, and the k2 estimate before and after it.

    The KL is a mean over tokens, and the loss of the run a sum over the budget of tokens.
    """
    made = step({"capture": {"every": 1}, "alg": {"name": "grpo", "loss_norm": "constant"}})
    made.train(moved(rewarded(some_groups(4))))
    folder = snapshot_folder(made.home, 0)
    found = recompute.replay(folder, [])
    snapshot = read_snapshot(folder)
    trainer, _ = weights.load_trainer(snapshot, 0, None)
    trainer.model.double()
    alg = load_algorithm(snapshot.alg_file, snapshot.manifest.run.alg)
    plan = snapshot.plan_of(0)
    plan.samples[:] = [replace(s) for s in plan.samples]

    def distance() -> float:
        batches = trainer.with_totals(plan.batches()[0])
        with torch.no_grad():
            parts = [k2(trainer.forward(b).logp, b.tokens.rollout_logp) for b in batches]
        return float(torch.cat(parts).double().mean())

    trainer.alg = alg
    single, _ = weights.load_trainer(snapshot, 0, None)
    computed = compute_update(single, alg, snapshot.plan_of(0), snapshot.groups)
    assert computed.slopes[computed.trained].all() and not computed.slopes[~computed.trained].any()
    gradient = computed.gradient
    length = inner(list(gradient.values()), list(gradient.values())) ** 0.5
    before, h = distance(), 1e-2
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p -= h * gradient[name].double() / length
    after = distance()
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p += 2 * h * gradient[name].double() / length
    slope = (after - distance()) / (2 * h)
    assert before > 0 and found.losses[0].kl_change == pytest.approx(slope, rel=1e-2)


@pytest.fixture
def folder(step) -> Path:
    made = step({"capture": {"every": 1}})
    made.train(rewarded(some_groups(4)))
    return snapshot_folder(made.home, 0)


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        replay_main(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_snapshot_is_refused_in_one_sentence(folder, tmp_path):
    assert "there is no such folder" in refused(str(tmp_path / "nowhere"))
    assert "a run keeps snapshots with capture.every" in refused(str(tmp_path))
    assert "such as step_00000" in refused(str(folder.parent.parent)) and "such as" in refused(str(folder.parent))
    assert "--update 1: the step has 1 updates" in refused(str(folder), "--update", "1")
    for name in ("batch.npz", "tokens.npz"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-1])
        assert f"is damaged: {name}" in refused(str(folder))
        (folder / name).write_bytes(kept)
    (folder / MANIFEST).write_text("{}")
    assert "is damaged" in refused(str(folder))
    (folder / MANIFEST).unlink()
    assert "so the run ended before it was complete" in refused(str(folder))


def test_a_loss_that_cannot_be_computed_is_refused_in_one_sentence(folder, tmp_path):
    assert "--alg: alg.name: there is no 'grop' in algs/ (did you mean" in refused(str(folder), "--alg", "grop")
    assert "there is no file" in refused(str(folder), "--alg", "nowhere.py")
    assert "--alg: sft" in refused(str(folder), "--alg", "sft") or "given text" in refused(str(folder), "--alg", "sft")
    assert "ppo needs the column values" in refused(str(folder), "--alg", "ppo")
    assert "needs the column ref_logp" in refused(str(folder), "--alg", "{as: x, name: grpo, kl: {coef: 0.1}}")
    assert "two losses are called grpo" in refused(str(folder), "--alg", "grpo", "--alg", "grpo")
    assert "is not a name, a file or a section" in refused(str(folder), "--alg", "3")
    assert "clip_hihg is not a known key" in refused(str(folder), "--alg", "{name: grpo, clip_hihg: 1}")


def test_weights_that_are_not_those_of_the_step_are_refused(step, tmp_path, tiny_path):
    made = step({"capture": {"every": 1}})
    for n in range(2):
        made.train(rewarded(some_groups(4, seed=n)))
    second = snapshot_folder(made.home, 1)
    said = refused(str(second))
    assert "name the folder with --model, or capture with capture.weights=true" in said
    said = refused(str(second), "--model", tiny_path)
    assert "does not hold the weights" in said and "tensors differ, such as" in said
    assert "there is no such folder" in refused(str(second), "--model", str(tmp_path / "nowhere"))


def test_weights_are_found_in_a_checkpoint_and_in_a_folder_by_name(step, tmp_path):
    made = step({"capture": {"every": 1}})
    made.train(rewarded(some_groups(4)))
    checkpoint = made.home / "checkpoints" / "step_00001"
    checkpoint.mkdir(parents=True)
    made.trainer.save_state(checkpoint)
    made.trainer.save_model(tmp_path / "by_name")
    made.train(rewarded(some_groups(4, seed=1)))
    second = snapshot_folder(made.home, 1)
    found = recompute.replay(second, [])
    assert found.is_reproduced and found.weights == str(checkpoint)
    (checkpoint / "policy" / "state.pt").write_bytes(b"cut off")
    said = f"; looked in {checkpoint} (resume: {checkpoint / 'policy' / 'state.pt'} is refused, because it is damaged"
    assert said in refused(str(second))
    named = recompute.replay(second, [], model=str(tmp_path / "by_name"))
    assert named.recomputed == found.recomputed and named.weights == str(tmp_path / "by_name")


def test_an_adapter_of_a_gpu_run_is_found_by_its_own_checksums(step):
    made = step({"model.lora": {"r": 4}, "capture": {"every": 1, "weights": True}})
    made.train(rewarded(some_groups(4)))
    folder = snapshot_folder(made.home, 0)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["run"]["on_cpu"] = False
    sums = manifest["updates"][0]["fingerprints"]
    # merged on another device, they differ in the last bit
    sums["whole"] = {name: value + 1 for name, value in sums["whole"].items()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found = recompute.replay(folder, [])
    assert found.is_reproduced and found.weights == str(folder / "weights" / "update_0")


def test_the_command_prints_a_table_or_json_and_exits_with_the_verdict(folder, capsys):
    assert replay_main([str(folder), "--alg", "grpo", "--alg", "{as: dr_grpo, name: grpo, loss_norm: constant}"]) == 0
    said = capsys.readouterr().out
    assert "\nreproduced: loss" in said and "\ndr_grpo: lowest cosine in " in said and "\nrun: lowest" not in said
    assert all(f"\n{line}" in said for line in MEANINGS)
    assert replay_main([str(folder), "--alg", "grpo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reproduced"] is True and [row["name"] for row in found["losses"]] == ["run", "grpo"]
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["updates"][0]["grad_norm"] *= 1 + 1e-5
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert replay_main([str(folder)]) == 1
    assert "NOT REPRODUCED" in capsys.readouterr().out
    assert replay_main([str(folder), "--tolerance", "1e-4"]) == 0


# ---------------------------------------------------------------- compared


SAME = [
    (2, {"name": "grpo", "entropy_coef": 0.01, "kl": {"coef": 0.1}}),
    (2, {"name": "cispo", "scale_rewards": "batch"}),
    (2, {"name": "p3o"}),
    (1, {"name": "ppo"}),
    (1, {"name": "reinforce_pp"}),
    (1, {"name": "grpo", "kl": {"coef": 0.1, "place": "reward"}}),
]


@pytest.mark.parametrize(("updates", "alg"), SAME, ids=lambda x: x["name"] if isinstance(x, dict) else str(x))
def test_the_shadow_of_the_same_loss_equals_it(step, alg, updates):
    groups = moved(rewarded(some_groups(4)))
    groups[0][1] = replace(groups[0][1], reward=None, failure="timeout")
    changes = {"alg": alg, "updates_per_step": updates, "trainer.micro_batch_tokens": 60}
    made = step(changes | {"compare_losses": [alg | {"as": "twin"}]})
    metrics = made.train(groups)
    compare_losses = {
        n.removeprefix("compare_losses/twin/"): v for n, v in metrics.items() if n.startswith("compare_losses/")
    }
    main = {n.removeprefix("train/"): v for n, v in metrics.items() if n.startswith("train/")}
    lacking = {"tokens", "lr", "updates_skipped", "padding", "shared", "grad_norm"}
    assert {"loss", "mismatch/ess"} <= compare_losses.keys()
    assert compare_losses == {n: v for n, v in main.items() if n not in lacking and not n.startswith("value/")}
    assert all(find_metric(name) for name in metrics)
    alone = step(changes)
    assert alone.train(groups) == {n: v for n, v in metrics.items() if not n.startswith("compare_losses/")}
    assert torch.equal(alone.trainer.flatten_weights(), made.trainer.flatten_weights()), "no gradient comes from it"


def test_a_shadow_has_the_metrics_of_a_run_with_its_loss(step):
    """Its own norm, its own advantages, its own clip bounds: on the first step both runs see the same."""
    groups = moved(rewarded(some_groups(4)))
    other = {"name": "gspo", "scale_rewards": "group", "loss_norm": "sequence"}
    watched = step({"alg.entropy_coef": 0.01, "compare_losses": [other | {"as": "other"}, "cispo"]}).train(groups)
    trained = step({"alg": other}).train(groups)
    for name in ("loss", "clip_frac_high", "approx_kl", "mismatch/kl", "mismatch/ess"):
        assert watched[f"compare_losses/other/{name}"] == trained[f"train/{name}"], name
    assert "train/entropy" in watched and "compare_losses/other/entropy" not in watched, "it asks for none"
    assert "compare_losses/cispo/capped" in watched


@pytest.mark.parametrize(
    ("compare_losses", "said"),
    [
        ("ppo", "compare_losses: ppo needs the column values, which the run's algorithm does not compute"),
        ({"name": "grpo", "kl": {"coef": 0.1}}, "compare_losses: grpo needs the column ref_logp"),
        ({"name": "grpo", "entropy_coef": 0.1}, "compare_losses: grpo needs the entropy"),
        ("grop", "compare_losses: alg.name: there is no 'grop'"),
        ("dpo", "trains on given text"),
        ({"name": "grpo", "as": "a/b"}, "the name 'a/b'"),
    ],
)
def test_a_shadow_that_needs_what_the_run_does_not_compute_is_refused(step, compare_losses, said):
    with pytest.raises(UserError) as error:
        step({"compare_losses": [compare_losses]})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_shadow_that_trains_on_other_tokens_is_refused(step):
    groups = [[replace(s, stop="length") for s in g] if i else g for i, g in enumerate(rewarded(some_groups(4)))]
    with pytest.raises(RunStopped, match="compare_losses: grpo trains on other tokens than the run's algorithm"):
        step({"compare_losses": [{"name": "grpo", "overlong": {"mode": "filter"}}]}).train(groups)


def test_a_shadow_that_is_not_finite_does_not_end_the_run(step, tmp_path):
    made = step({"compare_losses": [file_of(tmp_path / "hiccup.py", HICCUP)]})
    for n in range(2):
        metrics = made.train(rewarded(some_groups(4, seed=n)))
        assert "compare_losses/hiccup/loss" not in metrics and "compare_losses/hiccup/mismatch/kl" in metrics
        assert metrics["train/updates_skipped"] == 0
    [said] = made.said
    assert said.startswith("WARNING: compare_losses/hiccup/loss is ")


def test_an_update_that_was_skipped_counts_for_no_shadow(step, tmp_path):
    changes = {"alg": {"file": file_of(tmp_path / "hiccup.py", HICCUP)}, "compare_losses": ["grpo"]}
    metrics = step(changes).train(rewarded(some_groups(4)))
    assert metrics["train/updates_skipped"] == 1 and not [
        name for name in metrics if name.startswith("compare_losses/")
    ]
