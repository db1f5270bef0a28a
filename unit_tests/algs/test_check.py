"""algs.check passes every algorithm we ship, and catches what an author, or the framework itself, may get wrong."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from algs.base import Metrics
from algs.check.checker import Result, check, run
from algs.check.fixtures import made_up_step
from algs.grpo import GRPO
from algs.gspo import GSPO
from algs.ppo import PPO
from core.cli import run_guarded
from core.strict_model import StrictModel
from core.types.measures import At, Measure
from core.types.samples import Policy, Sample, Tokens
from unit_tests.helpers.variants import MORE, NEEDED, VARIANTS, name_variant

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent


def broken(results: list[Result]) -> list[str]:
    return [str(r) for r in results if r.status == "FAILED"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=name_variant)
def test_every_relative_that_is_a_setting_holds(name, settings):
    assert broken(check(name, NEEDED.get(name, {}) | settings)) == []


@pytest.mark.verify
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
    "a statistic of the micro-batch for the step's": (
        SURROGATE,
        SURROGATE.replace("advantage,", "advantage / (1 + tokens.advantage.abs().sum()),"),
        {"a": IN_HALF, "m": IN_HALF},
    ),
    "an advantage with gradient": (
        SURROGATE, SURROGATE.replace("advantage,", "advantage - 0.1 * policy.logp,"), {"d": ON_POLICY.format(r"1\.\d+")}
    ),
    "a detached ratio": (
        RATIO, RATIO.replace("policy.logp", "policy.logp.detach()"),
        {"d": r"is 0 instead of -?\d\S+, overall 0 times as much",
         "e": "depends on the policy through detached values only", "f": "to 0.25"},
    ),
    "a flipped sign": (
        RETURN, BEFORE_RETURN.format("loss = -loss"), {"d": ON_POLICY.format("-1"), "f": r"from 0.25 to 0.0\d"}
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
    assert [r.status for r in unplanted] == ["ok"] * 12 + ["n/a"]
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
    assert {"(d)", "(f)"} <= {*failed} and len(lines) == 15
    assert lines[-1].startswith(f"{len(failed)} of 13 FAILED: {' '.join(failed)}")


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
    text = text.replace("from algs.terms", "from algs.totals import total_alone\nfrom algs.terms")
    file.write_text(text.replace(old, "effective_sample_size(total_alone(self, policy, tokens).totals)"))
    for result in check(str(file), letters="am"):
        assert result.status == "FAILED" and "in one piece" in result.detail, result


STAGED = """
from algs.base import GroupRelative
from algs.reductions import count, exact_sum, kth


class Rare(GroupRelative):
    share: float = 0.3

    def totals(self, policy, tokens):
        x = policy.logp
        t = yield {"n": count(x), "sum": exact_sum(x)}
        yield {"cut": kth((x - t["sum"] / t["n"]).abs(), fraction=self.share)}

    @property
    def not_on_policy(self):
        return "rare tokens count twice"

    def loss(self, policy, tokens):
        rare = tokens.first["cut"] >= tokens.totals["cut"]
        return -(1 + rare) * tokens.advantage * policy.logp, {"rare": 0.0 * policy.logp + rare}
"""
PLANTED_TOTALS: dict[str, tuple[str, str, str]] = {
    "as it is": ("", "", "ok .* on 1, 2, 4 ranks, 8 splits and orders: equal"),
    "a plain sum": ("exact_sum(x)", "x.sum()", "FAILED .*values of cut in the first pass .*exact_sum what a threshold"),
    "a number of micro-batches": ("exact_sum(x)", "x.new_ones(())", r"FAILED .* sum is \d\.0 instead of 1\.0 in one"),
    "the mean of a micro-batch": ('t["sum"] / t["n"]', "x.mean()", "FAILED .*the total cut is .* instead of"),
    "a place that depends on the tokens": (
        "fraction=self.share",
        "k=max(1, len(x) // 3)",
        "FAILED .*another reduction",
    ),
    "a stage that depends on the tokens": ('yield {"cut"', 'if len(x) > 9: yield {"cut"', "FAILED "),
    "a threshold of its own": (
        'tokens.totals["cut"]',
        'tokens.first["cut"].mean()',
        "FAILED .* of the rows .*the derivative by",
    ),
}


@pytest.mark.parametrize("name", PLANTED_TOTALS)
def test_totals_of_a_users_file_are_examined_in_all_partitions(name, tmp_path):
    old, new, said = PLANTED_TOTALS[name]
    assert old in STAGED
    file = tmp_path / "rare.py"
    file.write_text(STAGED.replace(old, new) if old else STAGED)
    [m] = check(str(file), letters="m")
    assert re.search(said, str(m)), m


class PlainSums(GRPO):
    """A sum in floating point, on which no threshold depends."""

    def totals(self, policy: Policy, tokens: Tokens) -> dict[str, torch.Tensor]:
        return {"sum": policy.logp.sum()}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss * tokens.totals["sum"].abs(), metrics


def test_plain_sums_may_round():
    [m] = check(PlainSums, letters="m")
    assert m.status == "ok" and "equal but for plain sums in totals, which exact_sum would make exact" in m.detail


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


class MixesRows(GRPO):
    """Its measure is a share of the chunk's."""

    shift: float = 0.0

    @property
    def measures(self) -> dict[str, Measure]:
        def share(s: torch.Tensor, at: At) -> torch.Tensor:
            entropy = -(s.exp() * s).sum(-1)
            return entropy / entropy.mean() if not self.shift else entropy - math.inf

        return {"share": Measure(share)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss + policy.share, metrics


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, r"the measure share at token \d+ is \S+ in chunks of 1 and"), ({"shift": 1.0}, "share is not finite")],
)
def test_a_measure_that_depends_on_its_chunk_is_caught(settings, said):
    [o] = check(MixesRows, settings, letters="o")
    assert o.status == "FAILED" and re.search(said, o.detail), o


class MixesSlopes(GRPO):
    """Its measure is of each row alone, and its gradient of the chunk."""

    @property
    def measures(self) -> dict[str, Measure]:
        def share(s: torch.Tensor, at: At) -> torch.Tensor:
            entropy = -(s.exp() * s).sum(-1)
            return entropy + (entropy.mean() - entropy.mean().detach())

        return {"share": Measure(share)}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss + policy.share, metrics


def test_a_measure_whose_gradient_depends_on_its_chunk_is_caught():
    [o] = check(MixesSlopes, letters="o")
    assert (o.status, o.detail) == ("FAILED", "the gradient of the measures differs in chunks of 1")


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


class CountsFailures(GRPO):
    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        return super().compute_advantages([[replace(s, reward=s.reward or 0.0) for s in g] for g in groups])


class DividesByScored(GRPO):
    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        for group in groups:
            scored = [s.reward for s in group if s.reward is not None]
            assert sum(scored) / len(scored) < 10
        return super().compute_advantages(groups)


class LossWithoutEnd(GRPO):
    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss + math.inf, metrics


class CountsBatches(GRPO):
    def totals(self, policy: Policy, tokens: Tokens) -> dict[str, torch.Tensor]:
        return {"batches": torch.ones_like(policy.logp.sum())}

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        return loss * tokens.totals["batches"], metrics


class WithoutCredit(GRPO):
    def compute_advantages(self, groups: list[list[Sample]]) -> list[list[Sample]]:
        return groups


class SumsUnderOtherNorms(GRPO):
    def loss(self, policy: Policy, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = super().loss(policy, tokens)
        is_own = self.loss_norm == GRPO().loss_norm
        return loss * (1 if is_own else len(tokens.weight)), metrics


@pytest.mark.parametrize(
    ("cls", "letter", "said"),
    [
        (SumsUnderOtherNorms, "a", "in one"),
        (CountsFailures, "e", r"is \S+ instead of \S+ without them: a failure counts as a reward of 0"),
        (DividesByNothing, "e", "a group of one: the loss is nan, the largest gradient nan"),
        (DividesByScored, "e", "ZeroDivisionError"),
        (LossWithoutEnd, "e", "the loss is inf, the largest gradient "),
        (CountsBatches, "e", r"^an empty micro-batch: the gradient by logp at .* is \S+ instead of \S+ without it$"),
        (WithoutCredit, "d", "MissingColumn: tokens.advantage is not there"),
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


def test_a_token_is_named_by_the_place_where_it_is():
    step = made_up_step(GRPO())
    for token in {int(t) for group in step.groups for sample in group for t in sample.token_ids}:
        group, sample, place = map(int, re.findall(r"\d+", step.locate_token(token)))
        assert step.groups[group][sample].token_ids[place] == token


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


def test_the_command_line_says_it_all(capsys):
    assert run(["grpo", "clip_high=0.3", "kl.coef=0.1", "kl.target=0.5"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head == "GRPO, a policy gradient"
    assert [line[:13] for line in lines] == [f"({letter}) ok       " for letter in "abcdefghjklmn"]
    assert re.fullmatch(r"all obligations hold \(.* s\)", last)


def test_the_command_line_explains_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert said.startswith("usage: python -m algs.check [-h] FILE_OR_NAME [key=value ...] Proof obligations for an alg")
    for argument in ("FILE_OR_NAME a file, or a module of algs/ key=value", "hyper-parameters, such as clip_high=0.3"):
        assert argument in said


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
