"""Numbers, fields and sentences of snapshots and their pages, on made-up samples and without a trainer."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from analysis.capture.batch_file import read_batch, write_batch
from analysis.capture.compare import ONE_SILENT, OPPOSITE
from analysis.capture.pieces import PieceDecoder
from analysis.capture.step_recorder import describe_tokens
from analysis.capture.token_maps import Disagreement, LossTokens, TokenMaps, list_disagreements
from analysis.capture.tokens import (
    MANIFEST,
    TOKEN_COLUMNS,
    CapturedSample,
    TokenColumn,
    read_captured,
    snapshot_folder,
    write_captured,
)
from analysis.capture.triggers import Triggers
from analysis.report.captured import encode_column
from analysis.report.replay_page import make_records
from analysis.report.selection import Entry, choose_samples
from configs.capture_schema import CaptureConfig
from core.types.arrays import is_equal
from core.types.images import PlacedImage
from core.types.samples import Policy, Prompt, Sample, Tokens
from unit_tests.helpers.examples import six_tokens
from unit_tests.helpers.image_models import draw, say


def test_every_field_of_a_sample_comes_back_from_a_snapshot(tmp_path: Path):
    image = draw()
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    asked = [say("user", image, "How many?")]
    given = [{"role": "assistant", "content": "three"}]
    whole = six_tokens(
        prompt=Prompt(
            id="row", messages=asked, answer="3", extra={"k": [1]}, source="a", tools=[tool], demonstration=given
        ),
        rollout_logp=[0.0, 0.0, -1.0, -2.0, 0.0, -3.0],
        versions=[-1, -1, 3, 3, -1, 4],
        origin="other",
        stop="length",
        reward=0.5,
        reward_parts={"right": 0.5},
        completion="three",
        transcript=[{"role": "assistant", "content": "three"}, say("tool", image)],
        counts={"turns": 2.0},
        notes=[{"by": "judge", "text": "It is right.", "reading": 0.5}],
        log="the end of the output",
        advantage=[0.5] * 6,
        columns={"values": [0.25] * 6, "mine": [[1.0, 2.0]] * 6},
        excluded=[False, False, False, True, False, False],
        episode=1,
        turns=[(2, 4), (5, 6)],
        turn_rewards=[0.125, 0.25],
        turn_numbers=[0, 2],
        player=1,
        images=[PlacedImage(image, 0, 1, (1, 1))],
        kept=[[], [], [12, 13], [13], [], [15, 16]],
        routes=np.arange(12, dtype=np.uint8).reshape(6, 2, 1),
    )
    plain = six_tokens()
    failed = six_tokens(failure="timeout")
    same = {f.name for f in fields(Sample) if is_equal(getattr(whole, f.name), getattr(plain, f.name))}
    assert same == {"token_ids", "action_mask", "failure"}, "all others are not at their default"
    write_batch(tmp_path, [[whole, failed], [plain]])
    again = read_batch(tmp_path)
    assert again == [[whole, failed], [plain]]
    for field in fields(Prompt):
        assert getattr(again[0][0].prompt, field.name) == getattr(whole.prompt, field.name), field.name


def test_the_numbers_of_every_token_are_those_of_the_training_pass():
    policy = Policy(logp=torch.tensor([-1.0, -2.0], requires_grad=True), entropy=torch.tensor([0.5, 0.75]))
    tokens = Tokens(
        weight=torch.tensor([0.25, 0.5]),
        advantage=torch.tensor([1.0, -1.0]),
        rollout_logp=torch.tensor([-1.5, -2.0]),
        prox_logp=torch.tensor([-1.0, -3.0]),
        ref_logp=torch.tensor([-1.0, -3.0]),
    )
    metrics = {"clip_frac_high": torch.tensor([0.0, 1.0]), "clip_frac_low": torch.tensor([0.0, 0.0])}
    found = describe_tokens(policy, tokens, torch.tensor([3.0, 4.0]), metrics)
    expected = {
        "advantage": [1.0, -1.0],
        "weight": [0.25, 0.5],
        "logp": [-1.0, -2.0],
        "rollout_logp": [-1.5, -2.0],
        "logp_difference": [0.5, 0.0],
        "ratio": [1.0, exp(1)],
        "loss": [3.0, 4.0],
        "clipped": [0.0, 1.0],
        "entropy": [0.5, 0.75],
        # q/p - 1 - log(q/p) of log(q/p) = -1
        "kl": [0.0, exp(-1)],
    }
    assert {name: values.tolist() for name, values in found.items()} == {
        name: pytest.approx(values) for name, values in expected.items()
    }
    assert {*expected} == {*TOKEN_COLUMNS} and not any(values.requires_grad for values in found.values())
    first = describe_tokens(
        Policy(logp=policy.logp),
        Tokens(weight=tokens.weight, advantage=tokens.advantage, rollout_logp=tokens.rollout_logp),
        torch.tensor([3.0, 4.0]),
        {},
    )
    assert {*TOKEN_COLUMNS} - {*first} == {"clipped", "entropy", "kl"}
    assert first["ratio"].tolist() == [1.0, 1.0], "the first update of a step"


def test_a_gradient_norm_is_compared_with_the_twenty_steps_before():
    triggers = Triggers(CaptureConfig(on=["grad_norm"], grad_norm_times=3))

    def find(norm: float) -> str:
        return triggers.find_event({"train/grad_norm": norm})

    said = [find(1.0) for _ in range(5)]
    assert said == [""] * 5
    assert find(4.0) == (
        "grad_norm: train/grad_norm is 4, more than capture.grad_norm_times=3 times 1, the median of the 5 steps before"
    )
    for _ in range(14):
        assert find(1.0) == ""
    assert find(4.0).endswith(" times 1, the median of the 20 steps before")
    # all of the last twenty are 10, so the median is
    said = [find(10.0) for _ in range(20)]
    assert said[0] and not said[-1] and find(29.0) == ""
    assert find(31.0).endswith(" times 10, the median of the 20 steps before")


def test_a_page_of_a_replay_has_a_record_for_each_sample_that_is_kept():
    nan = float("nan")
    samples = [
        CapturedSample(step=0, group=g, sample=i, reward=reward, pieces=pieces, columns={})
        for g, i, reward, pieces in [(0, 0, 1.0, ["a", "b"]), (0, 1, 0.0, ["c"]), (3, 0, nan, ["d", "e"])]
    ]
    slopes = np.array([nan, -0.5, nan, 0.25, nan], dtype=np.float32)
    marks = np.array([nan, 1.0, nan, 0.0, nan], dtype=np.float32)
    run = LossTokens(name="run", slope=slopes, clipped=marks, judged=marks * 0)
    other = LossTokens(name="mine", slope=-slopes, clipped=None, judged=marks)
    records = make_records(TokenMaps(samples=samples, losses=[run, other]), [0, 2])

    def encoded(name: str, span: slice) -> dict[str, str | None]:
        loss = run if name == "run" else other
        clipped = None if loss.clipped is None else encode_column(loss.clipped[span])
        return {
            "slope": encode_column(loss.slope[span]),
            "clipped": clipped,
            "judged": encode_column(loss.judged[span]),
        }

    assert records == [
        {"number": i, "group": g, "sample": 0, "reward": reward, "pieces": pieces}
        | {"losses": {name: encoded(name, span) for name in ("run", "mine")}}
        for i, g, reward, pieces, span in [
            (0, 0, 1.0, ["a", "b"], slice(0, 2)),
            (2, 3, None, ["d", "e"], slice(3, 5)),
        ]
    ]


def test_no_group_takes_more_than_a_fourth_of_the_samples_on_a_page():
    samples = [Entry(i // 16, float(i % 16 == i // 16)) for i in range(512)]
    assert [len(group.samples) for group in choose_samples(samples, 32, step=0)] == [8, 8, 8, 8]
    two = choose_samples(samples[:32], 24, step=0)
    assert [len(group.samples) for group in two] == [12, 12], "but for a page with room for all of few groups"


def test_the_tokens_on_which_losses_differ_most_come_first():
    nan = float("nan")

    def numbers(name: str, slope: list[float], judged: list[float]) -> LossTokens:
        arrays = [np.array(one, dtype=np.float32) for one in (slope, judged)]
        return LossTokens(name=name, clipped=None, slope=arrays[0], judged=arrays[1])

    samples = [
        CapturedSample(step=0, group=0, sample=i, reward=0.0, pieces=["x"] * n, columns={})
        for i, n in enumerate((2, 3))
    ]
    run = numbers("run", [nan, -0.5, nan, 0.25, 1.0], [nan, 0, nan, 0, 0])
    other = numbers("other", [nan, 0, nan, 0, 0], [nan, ONE_SILENT, nan, ONE_SILENT, ONE_SILENT])
    mine = numbers("mine", [nan, 0.5, nan, nan, -1.0], [nan, OPPOSITE, nan, ONE_SILENT, OPPOSITE])
    # apart by 1, 0.25 and 2
    found = [
        Disagreement(sample=1, token=2, judged=OPPOSITE, of_run=1.0, of_loss=-1.0),
        Disagreement(sample=0, token=1, judged=OPPOSITE, of_run=-0.5, of_loss=0.5),
        Disagreement(sample=1, token=1, judged=ONE_SILENT, of_run=0.25, of_loss=0.0),
    ]
    maps = TokenMaps(samples=samples, losses=[run, other, mine])
    assert [list_disagreements(maps, mine, most) for most in (0, 2, 9)] == [[], found[:2], found]
    assert list_disagreements(maps, run, 9) == []


def test_one_captured_sample_comes_back_alone(tmp_path: Path):
    folder = snapshot_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    columns: dict[TokenColumn, Any] = {"logp": np.array([-0.5, -1.0], dtype=np.float32)}
    one = CapturedSample(step=0, group=3, sample=1, reward=0.5, pieces=["a", "b"], columns=columns)
    write_captured(folder, [one])
    (folder / MANIFEST).write_text("{}")
    [again] = read_captured(tmp_path, 0)
    assert again.columns["logp"].tolist() == [-0.5, -1.0] and [*again.columns] == ["logp"]
    assert replace(again, columns={}) == replace(one, columns={})


def test_the_text_of_a_token_is_decoded_once(tiny_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    ids = tokenizer.encode("3+3=", add_special_tokens=False)
    decoder = PieceDecoder(tokenizer)
    assert decoder.decode(ids) == decoder.decode(ids) == ["3", "+", "3", "="]
    assert decoder.known == dict(zip(ids, "3+3=", strict=True))
