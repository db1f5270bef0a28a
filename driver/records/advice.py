"""Advice on a run: rules as pure functions over the lines of metrics.jsonl. Each rule reports once per run.

A rule reads only the first and last lines, so its cost does not grow with the run. It returns a sentence with the
observation and a possible fix, or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from configs.eval_schema import EvalConfig
from configs.schema import RLConfig, RunConfig
from core import metrics as names
from core.draft_metrics import ROLLOUT_ACCEPTED
from core.judge_metrics import JUDGE_ANCHOR_ERROR, SECOND_CORR, SECOND_MEAN
from core.types.run_summary import Warned

WINDOW = 5
"""Steps averaged into a mean. Single steps are too noisy."""
FEWEST = 3 * WINDOW
"""Minimum number of steps for a trend."""
FEW_ACCEPTED = 0.2
"""Largest fraction of accepted drafts to report."""
LARGE_SET = 256
"""Smallest mean size of kept sets to report."""
AT_LIMIT = 0.9
"""Fraction of truncated replies from which on all have one length."""
LONG = 20
"""Minimum number of steps to report that something never happens."""
Line = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the recipe that the rules read; defaults in supervised runs."""

    group_size: int = 1
    updates_per_step: int = 1
    max_new_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """First and last lines of a run."""

    first: Sequence[Line]
    """At most WINDOW."""
    last: Sequence[Line]
    """At most LONG, newest last."""
    n: int
    """Number of steps logged by this process."""
    evaluated: Sequence[Line] = ()
    """Evaluations logged by this process, newest last."""

    def mean_at_start(self, name: str) -> float | None:
        """Return the mean over the first WINDOW steps; None if the metric is missing in any."""
        return average(self.first[:WINDOW], name)

    def mean_now(self, name: str, steps: int = WINDOW) -> float | None:
        """Return the mean over the last steps; None if there are too few, or the metric is missing in any."""
        return average(self.last[-steps:], name) if len(self.last) >= steps else None


def average(lines: Sequence[Line], name: str) -> float | None:
    """Return the mean of a metric; None without lines, or if the metric is missing in any."""
    if not lines or any(name not in line for line in lines):
        return None
    return sum(line[name] for line in lines) / len(lines)


def find_lost_groups(history: History, settings: Settings) -> str | None:
    """Report if at least half of the groups have equal rewards."""
    share = history.mean_now(names.ROLLOUT_ZERO_STD)
    # A group of one has no spread, whatever the reward is.
    if settings.group_size < 2 or share is None or share < 0.5:
        return None
    return (
        f"in the last {WINDOW} steps, {share:.0%} of the groups had the same reward for every sample, and taught "
        "nothing: the prompts are too hard or too easy by now; try others, a larger group_size, or "
        "alg.dynamic_sampling where the algorithm has it"
    )


def find_entropy_collapse(history: History, settings: Settings) -> str | None:
    """Report an entropy below a fifth of the initial entropy."""
    then, now = history.mean_at_start(names.TRAIN_ENTROPY), history.mean_now(names.TRAIN_ENTROPY)
    if history.n < FEWEST or then is None or now is None or then <= 0 or now > then / 5:
        return None
    return (
        f"the entropy of the policy fell from {then:.3g} to {now:.3g}: it samples nearly the same text every time, and "
        "soon learns nothing new; raise alg.entropy_coef, or lower trainer.lr"
    )


def clip_fraction(line: Line) -> float | None:
    """Return the fraction of clipped tokens; None for an algorithm without a clip."""
    parts = [line[name] for name in (*names.CLIP_FRACTIONS, names.CLIP_FRACTION) if name in line]
    return sum(parts) if parts else None


def find_heavy_clipping(history: History, settings: Settings) -> str | None:
    """Report clipping of more than half of the tokens."""
    seen = [clip_fraction(line) for line in history.last[-WINDOW:]]
    found = [value for value in seen if value is not None]
    if len(found) < WINDOW or sum(found) / WINDOW <= 0.5:
        return None
    return (
        f"the clip acted on {sum(found) / WINDOW:.0%} of the tokens in the last {WINDOW} steps: the updates of a step "
        "go further than the clip allows; lower trainer.lr or updates_per_step"
    )


def find_idle_clipping(history: History, settings: Settings) -> str | None:
    """Report a clip that never acts. With a single update per step the ratio is always 1."""
    seen = [clip_fraction(line) for line in history.last]
    found = [value for value in seen if value is not None]
    if settings.updates_per_step < 2 or len(found) < LONG or max(found) > 1e-4:
        return None
    return (
        f"the clip acted on no token in the last {LONG} steps: the {settings.updates_per_step} updates of a step "
        "hardly move the policy; trainer.lr may be too low"
    )


def find_growing_mismatch(history: History, settings: Settings) -> str | None:
    """Report a mismatch of engine and trainer that is above rounding and five times the initial mismatch."""
    then, now = history.mean_at_start(names.MISMATCH_KL), history.mean_now(names.MISMATCH_KL)
    # Below 1e-3 nats the difference is rounding in bfloat16, however much it grows.
    if history.n < FEWEST or then is None or now is None or now < 1e-3 or now < 5 * max(then, 0.0):
        return None
    return (
        f"the mismatch of engine and trainer ({names.MISMATCH_KL}) grew from {then:.1e} to {now:.1e}: sync weights "
        "more often (weight_sync.every, max_staleness), lower trainer.lr, or look for a numeric problem of the engine"
    )


def find_full_budget(history: History, settings: Settings) -> str | None:
    """Report if the token budget truncates at least a quarter of the samples."""
    share = history.mean_now(names.ROLLOUT_TRUNCATED)
    if share is None or share < 0.25:
        return None
    return (
        f"{share:.0%} of the samples of the last {WINDOW} steps were cut off at rollout.max_new_tokens="
        f"{settings.max_new_tokens}: raise it, or make long samples cost something (alg.overlong)"
    )


def find_large_sets(history: History, settings: Settings) -> str | None:
    """Report kept sets that take a kilobyte and more per token."""
    size = history.mean_now(names.ROLLOUT_SET_SIZE, steps=1)
    if size is None or size < LARGE_SET:
        return None
    return (
        f"rollout.top_p and min_p keep {size:.0f} tokens on average, and each set is recorded with 4 bytes a token: "
        "bound them with rollout.top_k, such as 100"
    )


def find_costly_drafts(history: History, settings: Settings) -> str | None:
    """Report drafts of which few are accepted, so that checking them costs more than they save."""
    share = history.mean_now(ROLLOUT_ACCEPTED)
    if share is None or share > FEW_ACCEPTED:
        return None
    return (
        f"{share:.0%} of the drafted tokens of the last {WINDOW} steps were accepted, so drafts hardly pay: leave "
        "rollout.vllm.speculative_config out, or compare the speed with and without it (feynrl doctor RECIPE --knob)"
    )


def find_reward_of_length(history: History, settings: Settings) -> str | None:
    """Report a reward that follows the length of replies, which have grown by a fifth."""
    corr = history.mean_now(names.REWARD_LENGTH_CORR)
    # A policy that has found out writes replies of one length, that of the limit. A correlation is missing also where
    # all rewards are equal.
    if corr is None and (history.mean_now(names.ROLLOUT_TRUNCATED) or 0.0) >= AT_LIMIT:
        corr = history.mean_at_start(names.REWARD_LENGTH_CORR)
    then, now = history.mean_at_start(names.ROLLOUT_TOKENS_MEAN), history.mean_now(names.ROLLOUT_TOKENS_MEAN)
    if history.n < FEWEST or corr is None or then is None or now is None or corr < 0.5 or now < 1.2 * then:
        return None
    return (
        f"the reward follows the length of the replies (correlation {corr:.2f} within groups), which grew from "
        f"{then:.0f} to {now:.0f} tokens: if longer is not better (samples/ shows them), tell the judge so in "
        "prompt_file, or make long samples cost something (alg.overlong)"
    )


def find_blind_spot(history: History, settings: Settings) -> str | None:
    """Report that the policy gains by its own reward and loses by eval_reward, in two evaluations in a row."""
    own, other = names.EVAL.format(names.REWARD_MEAN), names.EVAL.format(SECOND_MEAN)
    lines = [line for line in history.evaluated if own in line and other in line]
    if len(lines) < 3:
        return None
    first, *later = lines[0], *lines[-2:]
    if not all(line[own] > first[own] and line[other] < first[other] for line in later):
        return None
    return (
        f"on data.eval the reward rose from {first[own]:.3g} to {later[-1][own]:.3g}, and eval_reward fell from "
        f"{first[other]:.3g} to {later[-1][other]:.3g}: the policy has found what the judge of training likes wrongly; "
        "read the samples that it scores highest, correct its prompt, or train on another judge"
    )


def find_changed_judge(history: History, settings: Settings) -> str | None:
    """Report a judge whose two rewards of the held-out samples no longer agree."""
    name = names.EVAL.format(SECOND_CORR)
    values = [line[name] for line in history.evaluated if name in line]
    if len(values) < 3 or values[0] < 0.3 or max(values[-2:]) > values[0] / 2:
        return None
    return (
        f"the correlation of reward and eval_reward on data.eval fell from {values[0]:.2f} to {values[-1]:.2f}: they "
        "no longer judge alike what the policy writes by now; read samples on which they differ"
    )


def find_drifting_judge(history: History, settings: Settings) -> str | None:
    """Report a judge whose error on anchors has doubled, and grown by a tenth of the scale."""
    first = [line[JUDGE_ANCHOR_ERROR] for line in history.first if JUDGE_ANCHOR_ERROR in line]
    last = [line[JUDGE_ANCHOR_ERROR] for line in history.last if JUDGE_ANCHOR_ERROR in line][-2:]
    # two in a row, because a verdict is drawn
    if not first or history.n <= WINDOW or len(last) < 2 or min(last) < max(2 * first[0], first[0] + 0.1):
        return None
    return (
        f"the judge's error on the anchors grew from {first[0]:.2f} to {last[-1]:.2f} of the scale: the judge has "
        "changed, and so has the reward; pin the version of the model, or start again with the new judge"
    )


def find_endless_warmup(history: History, settings: Settings) -> str | None:
    """Report a learning rate that still rises at the last step."""
    rates = [line[names.TRAIN_LR] for line in history.last if names.TRAIN_LR in line]
    if len(rates) < 2 or rates[-1] <= rates[-2]:
        return None
    return (
        f"the learning rate was still warming up when the run ended (it reached {rates[-1]:.2e}): lower "
        "trainer.warmup_updates, or train longer"
    )


Rule = Callable[[History, Settings], str | None]
DURING: dict[str, Rule] = {
    "groups_without_signal": find_lost_groups,
    "entropy_collapse": find_entropy_collapse,
    "clip_too_much": find_heavy_clipping,
    "clip_never": find_idle_clipping,
    "mismatch_grows": find_growing_mismatch,
    "length_budget": find_full_budget,
    "large_sets": find_large_sets,
    "costly_drafts": find_costly_drafts,
    "reward_of_length": find_reward_of_length,
    "judge_blind_spot": find_blind_spot,
    "judges_disagree": find_changed_judge,
    "judge_drifts": find_drifting_judge,
}
"""Rules applied after every step."""
AT_END: dict[str, Rule] = {"warmup_at_end": find_endless_warmup}
"""Rules applied once, after the last step."""


@dataclass
class Adviser:
    """State of the rules during a run: first and last lines, and warnings given."""

    settings: Settings
    steps: int
    """Steps of the whole run."""
    first: list[Line] = field(default_factory=list)
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=LONG))
    n: int = 0
    evaluated: list[Line] = field(default_factory=list)
    """Lines of all evaluations, of which a run has few."""
    given: dict[str, Warned] = field(default_factory=dict[str, Warned])
    """Warning of each rule that has reported."""

    def read_line(self, line: Line) -> list[tuple[str, str]]:
        """Add a step's line; return rules that report for the first time, with their sentences."""
        if self.n < WINDOW:
            self.first.append(line)
        self.last.append(line)
        self.n += 1
        history = History(first=self.first, last=tuple(self.last), n=self.n, evaluated=self.evaluated)
        is_last = line.get(names.STEP_NUMBER) == self.steps - 1
        rules = DURING | AT_END if is_last else DURING
        new: list[tuple[str, str]] = []
        for name, rule in rules.items():
            # Once per rule: the same advice after every step would bury the lines.
            if name not in self.given and (text := rule(history, self.settings)) is not None:
                self.given[name] = Warned(step=int(line[names.STEP_NUMBER]), rule=name, text=text)
                new.append((name, text))
        return new


def make_settings(cfg: RunConfig | EvalConfig) -> Settings:
    """Return the settings of the recipe that the rules read."""
    if not isinstance(cfg, RLConfig):
        return Settings()
    return Settings(
        group_size=cfg.group_size, updates_per_step=cfg.updates_per_step, max_new_tokens=cfg.rollout.max_new_tokens
    )
