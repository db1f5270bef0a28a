"""A replay on made-up numbers: how losses are compared, what counts as reproduced, and the lines that say so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from algs.grpo import GRPO
from analysis.capture.compare import ONE_SILENT, OPPOSITE, Comparison, compare_losses, compute_cosine, judge_tokens
from analysis.capture.gradient import Computed
from analysis.capture.losses import parse_loss
from analysis.capture.observer import Recorder
from analysis.capture.recompute import Replay, choose_tolerance, measure_difference
from analysis.capture.record import average_loss
from analysis.capture.replay import read_losses
from analysis.capture.table import HEADER, MEANINGS, describe_replay, describe_reproduction, format_row
from analysis.capture.token_maps import Disagreement, LossTokens, TokenMaps
from analysis.capture.tokens import CapturedSample
from analysis.capture.weights import describe_difference, list_sources
from analysis.report.replay_page import choose_samples, count_disagreements
from configs.capture_schema import CaptureConfig
from unit_tests.helpers.sentences import tell

NAN = float("nan")


def computed(slopes: list[float], trained: list[int], gradient: dict[str, list[float]], **more: Any) -> Computed:
    given: dict[str, Any] = {
        **{"loss": 0.5, "metrics": {"m": 1.0}, "grad_norm": 2.0, "slopes": np.array(slopes), "clipped": None},
        **{"trained": np.array(trained, dtype=bool), "gradient": {k: torch.tensor(v) for k, v in gradient.items()}},
    }
    return Computed(**given | more)


RUN = computed([-1, 2, 0, 0, 0], [1, 1, 1, 0, 0], {"layers.0.a": [3.0, 4.0], "layers.1.a": [0.0, 0.0], "norm": [1.0]})
MINE = computed(
    [1, 5, 3, 0, 0],
    [1, 1, 1, 1, 0],
    {"layers.0.a": [4.0, 3.0], "layers.1.a": [1.0, 0.0], "norm": [-1.0]},
    clipped=np.array([1.0, 0, 0, 0, 1]),
)


def test_losses_are_compared_token_by_token_and_layer_by_layer():
    of_kl = {"layers.0.a": torch.tensor([1.0, 0.0]), "layers.1.a": torch.zeros(2), "norm": torch.tensor([2.0])}
    found = compare_losses("mine", MINE, RUN, of_kl)
    assert judge_tokens(MINE, RUN).tolist() == [OPPOSITE, 0, ONE_SILENT, 0, 0]
    # of the four tokens that either trains on; three of the loss's own four have a gradient, and one is clipped
    assert (found.opposite, found.one_silent, found.silent, found.clipped) == (0.25, 0.25, 0.25, 0.25)
    # 24 - 1 over the lengths sqrt(26) and sqrt(27); layer 1 has no gradient in the run
    assert found.cosine == pytest.approx(23 / math.sqrt(26 * 27))
    assert found.layers == {"norm": -1.0, "layers.0": pytest.approx(24 / 25)} and [*found.layers] == [
        "norm",
        "layers.0",
    ]
    # a step downhill of length 1: -(4 - 2) / sqrt(27)
    assert found.kl_change == pytest.approx(-2 / math.sqrt(27))
    assert (found.name, found.loss, found.grad_norm, found.metrics) == ("mine", 0.5, 2.0, {"m": 1.0})
    still = compare_losses("still", computed([0.0] * 5, [1] * 5, {name: [0.0] for name in of_kl}), RUN, of_kl)
    assert (still.cosine, still.layers, still.kl_change, still.silent, still.clipped) == (None, {}, 0.0, 1.0, None)


def test_the_cosine_of_parallel_gradients_is_never_beyond_one():
    for seed in range(50):
        one = {"a": torch.randn(5, generator=torch.Generator().manual_seed(seed))}
        cosines = [compute_cosine(one, {"a": one["a"] * factor}) for factor in (2, -2)]
        assert cosines == [pytest.approx(1.0, abs=1e-12), pytest.approx(-1.0, abs=1e-12)]
        assert cosines[0] is not None and cosines[1] is not None and -1 <= cosines[1] < cosines[0] <= 1


@pytest.mark.parametrize(
    ("loss", "again", "norm", "norm_again", "difference"),
    [
        (0.5, 0.25, 2.0, 2.0, 0.25),  # absolute below 1
        (4.0, 5.0, 2.0, 2.0, 0.25),  # relative above it
        (-4.0, -3.0, 2.0, 2.0, 0.25),
        (0.5, 0.5, 2.0, 3.0, 0.5),
        (0.5, 0.75, 2.0, 2.2, 0.25),
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (0.5, 0.5, None, 2.0, None),
        (math.inf, 0.5, 2.0, 2.0, None),
        (0.5, NAN, 2.0, 2.0, math.inf),
        (0.5, 0.5, 2.0, math.inf, math.inf),
    ],
)
def test_the_larger_of_two_differences_counts(loss, again, norm, norm_again, difference):
    assert measure_difference(loss, again, norm, norm_again) == difference


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "device", "tolerance"),
    [
        ("float32", True, "cpu", 1e-6),
        ("float32", False, "cuda", 1e-6),
        ("float32", False, "cpu", 1e-3),
        ("float32", True, "cuda", 1e-3),
        ("bfloat16", True, "cpu", 2e-2),
        ("bfloat16", False, "cpu", 2e-2),
    ],
)
def test_another_device_may_differ_by_more(dtype, on_cpu, device, tolerance):
    run: Any = SimpleNamespace(model={"dtype": dtype}, on_cpu=on_cpu)
    assert choose_tolerance(run, device) == tolerance


OWN_ROW = Comparison(
    **{"name": "run", "loss": 0.5, "grad_norm": 2.0, "cosine": 1.0, "layers": {"norm": 1.0}, "opposite": 0.0},
    **{"one_silent": 0.0, "silent": 0.25, "clipped": 0.125, "kl_change": -0.5, "metrics": {}},
)
OTHER = replace(
    OWN_ROW,
    name="mine",
    layers={"norm": -0.5, "layers.1": 0.25, "embed": 0.5, "layers.0": 0.75},
    **{"cosine": 0.25, "clipped": None, "kl_change": 12.0},
)


def found_replay(**changes: Any) -> Replay:
    usual: dict[str, Any] = {
        **{"snapshot": "s", "step": 3, "update": 1, "reason": "every: step 3", "algorithm": "grpo"},
        **{"code_changed": False, "weights": "w", "recorded": {"loss": 0.5, "grad_norm": 2.0}},
        **{"recomputed": {"loss": 0.5, "grad_norm": 2.0}, "difference": 1e-7, "tolerance": 1e-6},
        **{"kl_anchor": "the engine's policy", "losses": [OWN_ROW, OTHER]},
    }
    return Replay(**usual | changes)


def test_a_replay_is_a_table_with_the_layers_that_differ_most():
    head, weights, reproduced, *rest = describe_replay(found_replay()).splitlines()
    assert head == "step 3, update 1, trained by grpo; kept because of every: step 3"
    assert weights == "weights: w, by their checksums" and reproduced == describe_reproduction(found_replay())
    assert [line.split() for line in rest[1:4]] == [
        " ".join(HEADER).split(),
        ["run", "0.5", "2", "1.000000", "0.0%", "0.0%", "25.0%", "12.5%", "-0.5"],
        ["mine", "0.5", "2", "0.250000", "0.0%", "0.0%", "25.0%", "-", "+12"],
    ]
    assert len({len(line) for line in rest[1:4]}) == 1
    worst = "mine: lowest cosine in norm -0.5000, layers.1 0.2500, embed 0.5000"
    assert rest[4:] == ["", worst, *MEANINGS[:-1], f"{MEANINGS[-1]} the engine's policy."]
    changed = describe_replay(found_replay(code_changed=True)).splitlines()
    assert changed[2] == "note: grpo of algs/ has changed since the run"
    assert format_row(replace(OWN_ROW, cosine=None))[3] == "-"


@pytest.mark.parametrize(
    ("changes", "is_reproduced", "line"),
    [
        (
            {},
            True,
            "reproduced: loss 0.5 (recorded 0.5), gradient norm 2 (recorded 2); they differ by 1.0e-07, and 1e-06 is "
            "allowed",
        ),
        (
            {"difference": 0.25, "recomputed": {"loss": 0.25, "grad_norm": 3.0}},
            False,
            "NOT REPRODUCED: loss 0.25 (recorded 0.5), gradient norm 3 (recorded 2); they differ by 2.5e-01, and 1e-06 "
            "is allowed",
        ),
        ({"difference": 1e-6}, True, None),
        (
            {"difference": None, "recomputed": {"loss": NAN, "grad_norm": NAN}},
            None,
            "the run skipped this update, because it was not finite; recomputed: gradient norm nan",
        ),
    ],
)
def test_what_is_reproduced_is_told_in_a_line_and_in_json(changes, is_reproduced, line):
    found = found_replay(**changes)
    assert found.is_reproduced is is_reproduced and line in (None, describe_reproduction(found))
    told = found.to_json()
    assert told["reproduced"] is is_reproduced and "maps" not in told and len(told["losses"]) == 2
    numbers = found.recomputed
    assert told["recomputed"] == {k: v if math.isfinite(v) else None for k, v in numbers.items()}


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        ({"whole": {"a": 1}}, {"whole": {"a": 1}}, ""),
        ({"whole": {"a": 1, "b": 2}}, {"whole": {"a": 1, "b": 3}}, "1 of 2 tensors differ, such as b"),
        ({"whole": {"a": 1, "b": 2}}, {}, "2 of 2 tensors differ, such as a"),
        ({"whole": {"a": 1}}, {"whole": {"a": 1, "d": 1, "c": 1}}, "2 of 1 tensors differ, such as c"),
        ({"adapter": {"a": 1}}, {"whole": {"a": 1}, "adapter": {"a": 1}}, ""),
    ],
)
def test_weights_differ_by_a_value_or_by_a_tensor_too_many(expected, found, said):
    assert describe_difference(expected, found) == said


def test_weights_are_looked_for_where_the_step_may_have_left_them(tmp_path: Path):
    folder, other = tmp_path / "snapshots" / "step_00003", tmp_path / "elsewhere"
    for made in (folder / "weights" / "update_0", folder / "weights" / "update_1", other):
        made.mkdir(parents=True)
    (beside := tmp_path / "checkpoints" / "step_00003").mkdir(parents=True)
    run = SimpleNamespace(model={"path": "m"})

    def places(update: int, **changes: Any) -> list[str]:
        manifest = SimpleNamespace(**{"step": 3, "version": 3, "checkpoint": str(other), "run": run} | changes)
        snapshot: Any = SimpleNamespace(folder=folder, manifest=manifest)
        return [*list_sources(snapshot, update)]

    own = [str(folder / "weights" / f"update_{n}") for n in range(2)]
    assert places(0) == [own[0], str(beside), str(other)] and places(1) == [own[1]] and places(2) == []
    assert places(0, checkpoint=str(tmp_path / "gone"), version=0) == [own[0], str(beside), "m"]
    assert places(0, checkpoint=None) == [own[0], str(beside)]


def test_a_checkpoint_of_the_step_is_the_runs_own_or_the_one_it_began_with(tmp_path: Path):
    recorder: Any = Recorder.__new__(Recorder)
    recorder.home, recorder.resumed_from = tmp_path, tmp_path / "old" / "step_00003"
    assert [recorder._find_checkpoint(step) for step in (2, 3)] == [None, str(tmp_path / "old" / "step_00003")]
    (own := tmp_path / "checkpoints" / "step_00003").mkdir(parents=True)
    assert recorder._find_checkpoint(3) == str(own)
    recorder.resumed_from = None
    assert recorder._find_checkpoint(4) is None
    for every, due in ((0, []), (1, [0, 1, 2, 3]), (3, [0, 3])):
        recorder.cfg = CaptureConfig(every=every, on=["kl"])
        steps: Any = [SimpleNamespace(step=step) for step in range(4)]
        assert [one.step for one in steps if recorder._is_due(one)] == due


def test_the_loss_of_an_update_is_weighted_over_all_its_tokens():
    batches = [
        {"weight": np.array(w), "loss": np.array(loss)} for w, loss in (([1.0, 3.0], [2.0, 4.0]), ([4.0], [1.0]))
    ]
    assert average_loss(batches) == (2 + 12 + 4) / 8 and math.isnan(average_loss([]))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("grpo", "grpo"),
        ({"name": "grpo", "as": "a.b+c-1_2"}, "a.b+c-1_2"),
        ({"name": "grpo", "as": "x" * 60}, "x" * 60),
    ],
)
def test_a_compared_loss_has_the_name_that_it_is_given(given, name):
    found = parse_loss(given, key="--alg", max_new_tokens=8)
    assert found.name == name and isinstance(found.alg, GRPO)


@pytest.mark.parametrize("label", ["", "a/b", "a b", "x" * 61, 3])
def test_a_name_that_no_metric_can_have_is_refused(label):
    said = tell(lambda: parse_loss({"name": "grpo", "as": label}, key="--alg", max_new_tokens=8))
    assert said == f"--alg: the name {label!r} (as) must be up to 60 letters, digits and . _ + -"


def test_losses_of_a_command_line_are_names_or_sections():
    assert read_losses(["grpo", "a.py", "{as: x, name: grpo}"]) == ["grpo", "a.py", {"as": "x", "name": "grpo"}]
    for text in ("3", "[grpo]", "{a: "):
        said = tell(lambda text=text: read_losses([text]))
        assert said.startswith(f"--alg {text!r} is not a name, a file or a section")


def test_the_samples_of_a_page_are_those_with_most_to_see():
    samples = [CapturedSample(step=0, group=0, sample=i, reward=0.0, pieces=["x"] * 2, columns={}) for i in range(4)]

    def numbers(name: str, judged: list[float], clipped: list[float] | None) -> LossTokens:
        arrays = [None if one is None else np.array(one, dtype=np.float32) for one in (judged, clipped)]
        assert arrays[0] is not None
        return LossTokens(name=name, slope=arrays[0], judged=arrays[0], clipped=arrays[1])

    run = numbers("run", [0] * 8, [NAN, 0, 1, 1, 0, 0, 0, 0])
    mine = numbers("mine", [NAN, 0, 0, 0, ONE_SILENT, NAN, 0, OPPOSITE], None)
    maps = TokenMaps(samples=samples, losses=[run, mine])
    listed = {"mine": [Disagreement(sample=3, token=1, judged=OPPOSITE, of_run=1.0, of_loss=-1.0)]}
    # the second has two marks, the third and the fourth have one each, and a token of the fourth is listed
    assert [choose_samples(maps, listed, n) for n in (1, 2, 3, 9)] == [[3], [1, 3], [1, 2, 3], [0, 1, 2, 3]]
    assert [choose_samples(maps, {}, n) for n in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert count_disagreements(mine) == {"counted": 6, "opposite": 1, "one_silent": 1}
    assert count_disagreements(run) == {"counted": 8, "opposite": 0, "one_silent": 0}
