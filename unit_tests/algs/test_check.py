"""algs.check passes every algorithm we ship, and catches what an author, or the framework itself, may get wrong."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from algs import is_algorithm, list_algorithms
from algs.base import Metrics
from algs.check.checker import Result, check, run
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.ppo import PPO
from algs.terms import KL
from core.cli import run_guarded
from core.loading import load_module, resolve
from core.strict_model import StrictModel
from core.types.samples import Policy, Prompt, Sample, Tokens, make_sample

ROOT = Path(__file__).parent.parent.parent
NAMES = list_algorithms()
NEEDED: dict[str, dict[str, Any]] = {"opd": {"teacher": "somewhere"}}
OFF = {"correction": {"level": "none"}}
KL_IN_REWARD = {"kl": {"coef": 0.05, "place": "reward"}}
Variant = tuple[str, dict[str, Any]]
VARIANTS: list[Variant] = [
    (
        "grpo",
        {"scale_rewards": "group", "loss_norm": "sequence", "clip_high": 0.2, "kl": {"coef": 0.04, "estimator": "k3"}},
    ),
    ("grpo", {"overlong": {"mode": "filter"}, "kl": {"coef": 0.1}}),
    ("grpo", {"scale_rewards": "batch", "whiten": True, "dual_clip": 3.0, "entropy_coef": 0.01}),
    ("grpo", {"correction": {"level": "sequence", "mode": "mask"}, "kl": {"coef": 0.1, "estimator": "k2"}}),
    ("grpo", {"credit": "turn", "turn_discount": 0.5, "scale_rewards": "group", "dynamic_sampling": True}),
    ("cispo", {"anchor": "rollout", **OFF}),
    ("reinforce_pp", {"baseline": True, **KL_IN_REWARD}),
    ("ppo", {"credit": "turn", "turn_discount": 0.9, "bootstrap_truncated": True, **KL_IN_REWARD}),
    ("sft", {"dft": True}),
    ("dpo", {"reference_free": True, "length_norm": True, "beta": 2.0, "target_margin": 1.0}),
]
MORE: list[Variant] = [
    ("grpo", {"correction": {"mode": "clip"}, **KL_IN_REWARD}),
    ("gspo", {"form": "token"}),
    ("dppo", {"divergence": "kl"}),
    ("dpo", {"form": "hinge", "beta": 2.0}),
    ("reward_model", {"target_margin": 0.5, "center": 0.01}),
    ("grpo", {"loss_norm": "constant"}),
    ("grpo", {"dynamic_sampling": True, "overlong": {"mode": "penalty", "max_tokens": 10, "buffer": 4}}),
    ("grpo", {"scale_rewards": "mean", "kl": {"coef": 0.1, "estimator": "k3plus"}}),
    ("grpo", {"correction": {"level": "geometric", "mode": "mask", "low": 0.7, "high": 1.3}}),
    ("gspo", {"ratio": "product"}),
    ("gspo", {"ratio": "product", "form": "token", "leave_one_out": True}),
    ("gspo", {"credit": "turn", "form": "token"}),
    ("cispo", {"loss_norm": "prompt", "scale_rewards": "batch"}),
    ("reinforce_pp", KL_IN_REWARD),
    ("reinforce_pp", {"credit": "turn", "baseline": True, **KL_IN_REWARD}),
    ("ppo", {"value_clip": 0.2, "bootstrap_truncated": True}),
    ("ppo", {"dual_clip": 3.0, **KL_IN_REWARD}),
    ("rloo", KL_IN_REWARD),
    ("rloo", {"credit": "turn", **KL_IN_REWARD}),
    ("dpo", {"form": "ipo", "length_norm": True}),
    ("dpo", {"form": "robust", "label_smoothing": 0.2}),
]
"""More relatives, most of them parts of the variants above in other company: they take twice as long again."""


def name_variant(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(value)


def broken(results: list[Result]) -> list[str]:
    return [str(r) for r in results if r.status == "FAILED"]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_holds_as_it_comes(name):
    results = check(name, NEEDED.get(name))
    assert broken(results) == []
    supervised = not any(r.letter == "d" for r in results)
    assert supervised == (name in ("sft", "dpo", "orpo", "kto", "reward_model"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=name_variant)
def test_every_relative_that_is_a_setting_holds(name, settings):
    assert broken(check(name, NEEDED.get(name, {}) | settings)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), MORE, ids=name_variant)
def test_so_do_their_combinations(name, settings):
    assert broken(check(name, NEEDED.get(name, {}) | settings)) == []


def test_the_loss_of_the_readme_holds(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [text] = [block for block in blocks if "PolicyGradient" in block]
    file = tmp_path / "my_loss.py"
    file.write_text(text)
    assert broken(check(str(file))) == []


RATIO = "ratio = importance_ratio(policy.logp, tokens.prox_logp)"
SURROGATE = "loss = clipped_surrogate(ratio, tokens.advantage, self.clip_low, self.clip_high, self.dual_clip)"
RETURN = "return loss, clip_metrics"
BEFORE_RETURN = f"{{}}\n        {RETURN}"
FUNCTION = """
class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.detach().exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0] * FACTOR


class GRPO("""
IN_HALF = r"is \S+ instead of \S+ in one piece"
"""Numbers of a gradient that depends on the cut."""
ON_POLICY = r"is \S+ instead of \S+, overall {} times as much"
NO_SLOPE = r"backward\(\) says \S+, central differences with detached values held \S+"

PLANTED: dict[str, tuple[str, str, dict[str, str]]] = {
    "a mean over its micro-batch": (
        RETURN, BEFORE_RETURN.format("loss = loss - loss.mean()"), {"a": IN_HALF, "f": "from 0.25 to 0.25"}
    ),
    "a division by its tokens": (RETURN, BEFORE_RETURN.format("loss = loss / loss.numel()"), {"a": IN_HALF}),
    "a statistic of the micro-batch for the step's": (
        SURROGATE,
        SURROGATE.replace("advantage,", "advantage / (1 + tokens.advantage.abs().sum()),"),
        {"a": IN_HALF},
    ),
    "an advantage with gradient": (
        SURROGATE, SURROGATE.replace("advantage,", "advantage - 0.1 * policy.logp,"), {"d": ON_POLICY.format(r"1\.\d+")}
    ),
    "a detached ratio": (
        RATIO, RATIO.replace("policy.logp", "policy.logp.detach()"),
        {"d": ON_POLICY.format("0"), "e": "depends on the policy through detached values only", "f": "to 0.25"},
    ),
    "a flipped sign": (
        RETURN, BEFORE_RETURN.format("loss = -loss"), {"d": ON_POLICY.format("-1"), "f": r"from 0.25 to 0.0\d"}
    ),
    "an upside-down ratio": (
        RATIO, "ratio = importance_ratio(tokens.prox_logp, policy.logp)", {"d": ON_POLICY.format("-1")}
    ),
    "swapped clip bounds": (
        SURROGATE, SURROGATE.replace("self.clip_low, self.clip_high", "self.clip_high, self.clip_low"),
        {"h": r"clip_high from 0.28 to 0.14 moves the gradient at A=-1, ratio 0.\d+ from 0.\d+ to 0: clip_low's side"},
    ),
    "a clip that keeps the worse of the two": (
        SURROGATE, SURROGATE.replace("loss = ", "loss = -").replace("tokens.adv", "-tokens.adv"),
        {"h": r"clip_high from 0.28 to 0.14 moves no gradient with A=\+1"},
    ),
    "a hyper-parameter that is never read": (
        "    dual_clip:", "    sharpness: float = 1.0\n    dual_clip:", {"g": "never read: sharpness"}
    ),
    "a number taken out of the graph": (
        RETURN, BEFORE_RETURN.format("loss = loss * policy.logp.sum().item()"), {"c": NO_SLOPE}
    ),
    ".data for .detach()": (RETURN, BEFORE_RETURN.format("loss = loss * policy.logp.data.exp()"), {"c": NO_SLOPE}),
    "a wrong backward": ("class GRPO(", FUNCTION.replace("FACTOR", "2").lstrip(), {"c": NO_SLOPE}),
    "a column that it does not declare": (
        RETURN,
        BEFORE_RETURN.format("loss = loss + tokens.ref_logp"),
        {"a": r"MissingColumn: tokens.ref_logp .*planted.py, line \d+\)"},
    ),
    "a maximum over no token": (
        RETURN, BEFORE_RETURN.format("loss = loss + 0 * policy.logp.max()"), {"e": "RuntimeError: max"}
    ),
}  # fmt: skip


def copy_of_grpo(folder: Path, old: str = "", new: str = "") -> Path:
    text = (ROOT / "algs/grpo.py").read_text()
    assert old in text
    if "Exp(torch" in new:
        text = text.replace("from torch import Tensor", "import torch\nfrom torch import Tensor")
        text = text.replace(RATIO, "ratio = Exp.apply(policy.logp - tokens.prox_logp)")
    file = folder / "planted.py"
    file.write_text(text.replace(old, new))
    return file


@pytest.fixture(scope="module")
def unplanted(tmp_path_factory) -> list[Result]:
    return check(str(copy_of_grpo(tmp_path_factory.mktemp("grpo"))))


@pytest.mark.parametrize("name", PLANTED)
def test_what_an_author_may_get_wrong_is_named_with_its_numbers(name, tmp_path, unplanted):
    assert [r.status for r in unplanted] == ["ok"] * 9
    old, new, said = PLANTED[name]
    results = check(str(copy_of_grpo(tmp_path, old, new)), letters="".join(said))
    assert [r.letter for r in results] == [*said]
    for result in results:
        assert result.status == "FAILED" and re.search(said[result.letter], str(result)), result


def test_the_command_line_tells_what_failed_and_ends_with_1(tmp_path, capsys):
    old, new, _ = PLANTED["a flipped sign"]
    assert run([str(copy_of_grpo(tmp_path, old, new))]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line[:3] for line in lines if "FAILED" in line and line.startswith("(")]
    assert {"(d)", "(f)"} <= {*failed} and len(lines) == 11
    assert lines[-1].startswith(f"{len(failed)} of 9 FAILED: {' '.join(failed)}")


def test_a_right_backward_and_what_is_detached_on_purpose_are_borne(tmp_path):
    """Only on policy it is another gradient, which can be declared."""
    right = copy_of_grpo(tmp_path, "class GRPO(", FUNCTION.replace("FACTOR", "1").lstrip())
    assert [r.status for r in check(str(right), letters="c")] == ["ok"]
    weighted = "with torch.no_grad():\n            weight = 1 + (2 * policy.logp).exp()\n        loss = loss * weight"
    declared = (
        "class GRPO(GroupRelative):\n    @property\n    def not_on_policy(self): return 'sure tokens count more'\n"
    )
    file = copy_of_grpo(tmp_path, RETURN, BEFORE_RETURN.format(f"import torch\n        {weighted}"))
    assert [r.letter for r in check(str(file)) if r.status == "FAILED"] == ["d"]
    file.write_text(file.read_text().replace("class GRPO(GroupRelative):\n", declared))
    [d] = check(str(file), letters="d")
    assert (d.status, d.detail) == ("n/a", "declared: sure tokens count more")


def test_a_sum_over_the_micro_batch_in_place_of_the_totals_is_caught(tmp_path):
    text, old = (ROOT / "algs/p3o.py").read_text(), "effective_sample_size(tokens.totals)"
    assert old in text
    file = tmp_path / "planted.py"
    file.write_text(text.replace(old, "effective_sample_size(self.totals(policy, tokens))"))
    [a] = check(str(file), letters="a")
    assert a.status == "FAILED" and re.search(IN_HALF, a.detail)


class Sharp(StrictModel):
    """A section of the algorithm's own: one of its two keys is forgotten, and only one mode reads the other."""

    power: float = 2.0
    floor: float = 0.0


class Forgetful(GRPO):
    soft: bool = False
    sharp: Sharp = Sharp()
    scaled: float = 1.0

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        metrics["power"] = torch.full_like(loss, self.sharp.power if self.soft else self.scaled)
        return loss, metrics


def test_keys_of_a_section_count_and_those_read_in_one_mode_only_do_too():
    [g] = check(Forgetful, letters="g")
    assert (g.status, g.detail) == ("FAILED", "never read: sharp.floor")


class Unmoved(GRPO):
    scaled: float = 1.0

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss, metrics | {"scaled": torch.full_like(loss, self.scaled)}


def test_a_key_without_effect_is_a_note_and_no_failure():
    [g] = check(Unmoved, letters="g")
    assert (g.status, g.detail) == ("ok", "scaled; note: no effect seen of scaled")


class ReadsThePrompt(GRPO):
    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        return super().compute_advantages(
            [[replace(s, reward=(s.reward or 0.0) - s.rollout_logp[0]) for s in g] for g in groups]
        )


class CentresValues(PPO):
    def value_loss(self, values: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        return super().value_loss(values - values.sum() / 100, tokens)


class DividesByNothing(GRPO):
    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        return [[s.with_advantage(0.0 if len(g) > 1 else math.nan) for s in g] for g in groups]


@pytest.mark.parametrize(
    ("cls", "letter", "said"),
    [
        (DividesByNothing, "e", "a group of one: the loss is nan, the largest gradient nan"),
        (
            ReadsThePrompt,
            "b",
            "nan in rollout_logp at tokens that are not trained on, set before compute_advantages: the gradient",
        ),
        (CentresValues, "a", r"the gradient by values at group \d, sample \d, token \d+ is \S+ instead of \S+ in one"),
    ],
)
def test_credit_and_the_value_loss_are_asked_too(cls, letter, said):
    [failed] = check(cls, letters=letter)
    assert failed.status == "FAILED" and re.search(said, failed.detail), failed


class CountsFailures(GRPO):
    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        return super().compute_advantages([[replace(s, reward=s.reward or 0.0) for s in g] for g in groups])


def test_a_failure_that_counts_as_a_reward_of_zero_is_told_as_that():
    [e] = check(CountsFailures, letters="e")
    assert e.status == "FAILED"
    assert re.search(r"is \S+ instead of \S+ without them: a failure counts as a reward of 0", e.detail)


class LengthOfSamples(GRPO):
    """Its reward falls with what a sample holds, context included."""

    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        return super().compute_advantages(
            [[replace(s, reward=(s.reward or 0.0) - 0.01 * len(s.token_ids)) for s in g] for g in groups]
        )


class SplitsEpisodes(GSPO):
    """It compares sequences, and does not say that it needs them whole."""

    @property
    def whole_episodes(self) -> bool:
        return False


class PlaceInSequence(GRPO):
    """It trains less on a token, the more there are before it in its sequence."""

    @property
    def whole_episodes(self) -> bool:
        return True

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        same = tokens.seq_ids[:, None] == tokens.seq_ids
        return loss * 0.9 ** same.tril().sum(1), metrics


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (LengthOfSamples, r"episodes cut after every turn: .* is \S+ instead of \S+ with one sample per episode"),
        (SplitsEpisodes, "MissingColumn: tokens.seq_ids is not there; .* whole_episodes adds seq_ids"),
        (PlaceInSequence, r"episodes .* is \S+ instead of \S+ with one sample per episode"),
    ],
)
def test_what_changes_when_an_episode_is_cut_is_caught(cls, said):
    [j] = check(cls, letters="j")
    assert j.status == "FAILED" and re.search(said, j.detail), j


@pytest.mark.slow
def test_the_command_line_says_it_all_within_ten_seconds():
    command = [sys.executable, "-m", "algs.check", "grpo", "clip_high=0.3", "kl.coef=0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines, last = done.stdout.splitlines()
    assert head == "GRPO, a policy gradient"
    assert [line[:13] for line in lines] == [f"({letter}) ok       " for letter in "abcdefghj"]
    seconds = re.fullmatch(r"all obligations hold \((.*) s\)", last)
    assert seconds and float(seconds[1]) < 10


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["grpoo"], "there is no 'grpoo' in algs/ (did you mean 'grpo'?)"),
        (["no_such_loss.py"], "there is no file"),
        (["grpo", "clip_hihg=0.3"], "clip_hihg is not a known key; did you mean 'clip_high'?"),
        (["grpo", "clip_high=-1"], "clip_high=-1 is not valid: input should be greater than 0"),
        (["grpo", "clip_high"], "'clip_high' is not of the form key=value"),
        (["opd"], "teacher is missing"),
        (["grpo", "kl.coef=0.1", "kl.estimator=k1"], "kl: k1 in the loss has an expected gradient of zero"),
    ],
)
def test_a_mistake_is_one_sentence(argv, sentence, capsys):
    assert run_guarded(partial(run, argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


def a_sample(**changes: Any) -> Sample:
    """Two tokens of the prompt, then chosen, of another, chosen; the ids say where they stand."""
    fields: dict[str, Any] = {
        "prompt": Prompt(id="p", messages=[]),
        "token_ids": [10, 11, 12, 13, 14],
        "action_mask": [False, False, True, False, True],
        "rollout_logp": [-0.1 * t for t in range(5)],
        "versions": [0] * 5,
    }
    return make_sample(**fields | changes)


def only_chosen_tokens_are_learnt(packing: ModuleType) -> None:
    assert packing.pack([a_sample()], [0.5]).labels.tolist() == [12, 14]


def a_token_is_predicted_from_the_one_before(packing: ModuleType) -> None:
    batch = packing.pack([a_sample(), a_sample()], [0.5, 0.5])
    assert (batch.input_ids[batch.at] + 1).tolist() == batch.labels.tolist()


def what_is_not_learnt_reaches_no_loss(packing: ModuleType) -> None:
    for bad in (float("nan"), 1e6):
        tokens = packing.pack([a_sample(rollout_logp=[bad, bad, -1.0, bad, -1.0])], [0.5]).tokens
        logp = torch.full_like(tokens.weight, -1.0, requires_grad=True)
        ratio = (logp - tokens.rollout_logp).exp()
        (ratio * tokens.weight).sum().backward()
        assert logp.grad is not None and logp.grad[tokens.weight > 0].tolist() == [0.5, 0.5]
        assert logp.grad.isfinite().all()


def every_learnt_token_has_its_share_and_nothing_else_has(packing: ModuleType) -> None:
    short = a_sample(action_mask=[False, False, True, False, False])
    failed = a_sample(failure="timeout")
    weights = packing.token_weights([[a_sample(), short], [failed]], "token", horizon=1)
    assert weights == [1 / 3, 1 / 3, 0.0]


def an_episode_is_one_sequence(packing: ModuleType) -> None:
    branches = [a_sample(episode=0, action_mask=[t == chosen for t in range(5)]) for chosen in (2, 4)]
    weights = packing.token_weights([branches, [a_sample()]], "sequence", horizon=1)
    assert weights == [1 / 4, 1 / 4, 1 / 4]


def branches_are_in_order_of_time(episodes: ModuleType) -> None:
    masks = [[t == chosen for t in range(5)] for chosen in (4, 2)]
    later, first = (a_sample(episode=0, action_mask=m, turn_numbers=(n,)) for m, n in zip(masks, (1, 0), strict=True))
    [joined] = episodes.join_episodes([later, first]).samples
    assert joined.token_ids[joined.action_mask].tolist() == [12, 14]


def a_turn_has_no_part_in_its_baseline(credit: ModuleType) -> None:
    def last_advantage(last: float) -> float:
        returns = [torch.tensor([1.0, last]).numpy(), torch.tensor([2.0, 3.0]).numpy()]
        return float(credit.turn_advantages(returns, leave_one_out=True)[0][-1])

    assert last_advantage(7.0) - last_advantage(5.0) == pytest.approx(2.0)


def a_group_is_scaled_by_its_own_spread(credit: ModuleType) -> None:
    [up, down] = credit.group_advantages([1.0, 0.0], scale="group", batch_std=7.0)
    assert up == -down == pytest.approx(0.5**0.5, rel=1e-5)


def a_failed_sample_is_in_no_mean(credit: ModuleType) -> None:
    assert credit.group_advantages([1.0, None, 0.0]) == [0.5, 0.0, -0.5]


def the_penalty_pulls_towards_the_reference(base: ModuleType) -> None:
    class Still(base.PolicyGradient):
        def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
            return 0 * policy.logp, {}

    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    both = torch.full((2,), -2.0)
    tokens = Tokens(seq_ids=torch.zeros(2, dtype=torch.int64), weight=both, ref_logp=both, rollout_logp=both)
    for estimator in ("k2", "k3", "unbiased"):
        alg = Still(kl=KL(coef=0.1, estimator=estimator))
        [slope] = torch.autograd.grad(alg.objective(Policy(logp=logp), tokens)[0].sum(), logp)
        assert slope[0] > 0 > slope[1], "a token likelier than under the reference gets less likely"


def k3_grows_away_from_the_other(ops: ModuleType) -> None:
    d = torch.tensor([-1.0, 2.0], requires_grad=True)
    [slope] = torch.autograd.grad(ops.k3(d, torch.zeros(2)).sum(), d)
    torch.testing.assert_close(slope, 1 - (-d.detach()).exp())


class Bigram(torch.nn.Module):
    """The next token depends on the last alone: logits = table[token]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.config = SimpleNamespace(_attn_implementation="sdpa")

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.head(self.table(input_ids)))


def the_logp_is_that_of_the_next_token_at_the_temperature(forward: ModuleType) -> None:
    packing = importlib.import_module("data_feeds.packing.batches")
    model, batch = (
        Bigram(),
        packing.pack([a_sample(), a_sample(action_mask=[False, True, True, True, True])], [0.2, 0.2]),
    )
    got = forward.forward(model, model, batch, layout="padded", temperature=0.5).logp
    logp = (model.head(model.table.weight) / 0.5).log_softmax(-1)  # [token, next]
    torch.testing.assert_close(got, logp[batch.labels - 1, batch.labels])


Bug = tuple[str, list[tuple[str, str]], Callable[[ModuleType], None]]
LEARNT = "mask = sample.loss_mask[1 : count_inputs(sample) + 1]"
ALL = "mask = np.ones(count_inputs(sample), dtype=bool)"
WEIGHED = "repeat_runs(torch.tensor(weights, dtype=dtype).numpy(), counts)"
MASKED = "repeat_runs(np.array(weights), counts) * np.concatenate([s.loss_mask[1:] for s in samples])"
BUGS: dict[str, Bug] = {
    "prompt tokens are learnt": (
        "data_feeds.packing.batches", [(LEARNT, ALL)], only_chosen_tokens_are_learnt
    ),
    "a mask that weighs after exp": (
        "data_feeds.packing.batches",
        [
            (LEARNT, ALL),
            (WEIGHED, MASKED),
        ],
        what_is_not_learnt_reaches_no_loss,
    ),
    "an off-by-one shift in packing": (
        "data_feeds.packing.batches", [("[place[chosen]", "[np.roll(place, 1)[chosen]")],
        a_token_is_predicted_from_the_one_before,
    ),
    "an off-by-one shift in forward": (
        "modeling.forward", [("(row[batch.at], column[batch.at])", "(row[batch.at - 1], column[batch.at - 1])")],
        the_logp_is_that_of_the_next_token_at_the_temperature,
    ),
    "the logits of another temperature": (
        "modeling.forward", [("allowed_tokens.restrict(logits, temperature)", "allowed_tokens.restrict(logits, 1.0)")],
        the_logp_is_that_of_the_next_token_at_the_temperature,
    ),
    "a denominator that counts padding": (
        "data_feeds.packing.batches", [("n_tokens = sum(map(sum, counts))", "n_tokens = sum(map(len, counts)) * 5")],
        every_learnt_token_has_its_share_and_nothing_else_has,
    ),
    "a denominator that counts the prompt": (
        "data_feeds.packing.batches", [("[[s.n_trained for s", "[[len(s.action_mask) for s")],
        every_learnt_token_has_its_share_and_nothing_else_has,
    ),
    "the deviation of the whole batch": (
        "algs.credit",
        [("factor = 1 / std", "factor = 1 / batch_std")],
        a_group_is_scaled_by_its_own_spread,
    ),
    "samples counted as sequences": (
        "data_feeds.packing.batches",
        [("    numbers = number_episodes(group)\n", "    numbers = list(range(len(group)))\n")],
        an_episode_is_one_sequence,
    ),
    "branches in the order of the group": (
        "core.types.episodes",
        [("sorted(pieces, key=lambda piece: piece.number)", "pieces")],
        branches_are_in_order_of_time
    ),
    "a turn in its own baseline": (
        "algs.turns", [("leave_one_out=leave_one_out)\n    rows", "leave_one_out=False)\n    rows")],
        a_turn_has_no_part_in_its_baseline,
    ),
    "a failed sample counted as zero": (
        "algs.credit", [("[r for r in rewards if r is not None]", "[r or 0.0 for r in rewards]")],
        a_failed_sample_is_in_no_mean,
    ),
    "a KL penalty with the wrong sign": (
        "algs.base", [("loss = loss + self.kl.coef", "loss = loss - self.kl.coef")],
        the_penalty_pulls_towards_the_reference,
    ),
    "a KL estimate with the wrong sign": (
        "algs.ops", [("d = logp - other", "d = other - logp")], k3_grows_away_from_the_other
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_what_the_framework_may_get_wrong_breaks_a_property(name, tmp_path):
    module, replacements, holds = BUGS[name]
    original = importlib.import_module(module)
    holds(original)
    text = Path(str(original.__file__)).read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "planted.py"
    file.write_text(text)
    with pytest.raises(AssertionError):
        holds(load_module(resolve(str(file), "algs", offers=is_algorithm)))
