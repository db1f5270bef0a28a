"""Each rule speaks on a history that was made for it, and is silent on one that looks alike."""

import pytest

from driver.records.advice import AT_END, DURING, LONG, WINDOW, Adviser, History, Settings

RL = Settings(group_size=8, updates_per_step=2, max_new_tokens=64)


def line(step: int, **values: float) -> dict[str, float]:
    return {"step": float(step), **{name.replace("__", "/"): value for name, value in values.items()}}


def steps(n: int, name: str, value) -> list[dict[str, float]]:
    return [{"step": float(i), name: float(value(i))} for i in range(n)]


def ask(rule: str, lines: list[dict[str, float]], settings: Settings = RL) -> str | None:
    evaluated = [line for line in lines if "eval/reward/mean" in line]
    history = History(first=lines[:WINDOW], last=lines[-LONG:], n=len(lines), evaluated=evaluated)
    return (DURING | AT_END)[rule](history, settings)


def grows(n: int, corr: float, to: float) -> list[dict[str, float]]:
    """Replies of 10 tokens, and of `to` from the step 10 on."""
    return [line(i, reward__length_corr=corr, rollout__tokens_mean=to if i >= 10 else 10.0) for i in range(n)]


def evaluates(*pairs: tuple[float, float], corr: list[float] | None = None) -> list[dict[str, float]]:
    """Evaluations with these means of reward and eval_reward."""
    lines = [line(i, eval__reward__mean=own, eval__second_reward__mean=other) for i, (own, other) in enumerate(pairs)]
    return [one | {"eval/second_reward/corr": c} for one, c in zip(lines, corr or [0.9] * len(lines), strict=True)]


SPEAKS = [
    (
        "judge_drifts",
        steps(9, "judge/anchor_error", lambda i: 0.05 if i < 5 else 0.3),
        "from 0.05 to 0.30 of the scale",
    ),
    ("reward_of_length", grows(20, 0.8, 15.0), "(correlation 0.80 within groups), which grew from 10 to 15 tokens"),
    (
        "reward_of_length",
        [*grows(10, 0.9, 15.0), *[line(10, rollout__tokens_mean=15.0, rollout__truncated_fraction=0.95)] * 10],
        "(correlation 0.90 within groups), which grew from 10 to 15 tokens",
    ),
    ("judge_blind_spot", evaluates((1, 5), (2, 4), (3, 3)), "rose from 1 to 3, and eval_reward fell from 5 to 3"),
    ("judges_disagree", evaluates(*[(1, 1)] * 3, corr=[0.8, 0.3, 0.2]), "fell from 0.80 to 0.20"),
    ("groups_without_signal", steps(5, "rollout/zero_std_groups", lambda i: 0.5), "50% of the groups"),
    ("entropy_collapse", steps(15, "train/entropy", lambda i: 2.0 if i < 5 else 0.3), "fell from 2 to 0.3"),
    ("clip_too_much", steps(5, "train/clip_frac", lambda i: 0.6), "60% of the tokens"),
    ("clip_never", steps(20, "train/clip_frac", lambda i: 0.0), "no token in the last 20 steps"),
    ("mismatch_grows", steps(15, "train/mismatch/kl", lambda i: 1e-3 if i < 5 else 6e-3), "from 1.0e-03 to 6.0e-03"),
    ("length_budget", steps(5, "rollout/truncated_fraction", lambda i: 0.3), "rollout.max_new_tokens=64"),
    ("large_sets", steps(1, "rollout/kept_set_size_mean", lambda i: 300.0), "keep 300 tokens on average"),
    ("costly_drafts", steps(5, "rollout/accepted", lambda i: 0.1), "10% of the drafted tokens"),
    ("warmup_at_end", steps(5, "train/lr", lambda i: 1e-4 * (i + 1)), "it reached 5.00e-04"),
]
SILENT = [
    ("one odd grading", "judge_drifts", steps(20, "judge/anchor_error", lambda i: 0.5 if i == 18 else 0.05), RL),
    ("it was wrong before", "judge_drifts", steps(20, "judge/anchor_error", lambda i: 0.3), RL),
    ("small", "judge_drifts", steps(20, "judge/anchor_error", lambda i: 0.01 if i < 5 else 0.06), RL),
    ("replies stay as long", "reward_of_length", grows(20, 0.8, 11.0), RL),
    ("replies grow, whatever they earn", "reward_of_length", grows(20, 0.3, 15.0), RL),
    ("too early", "reward_of_length", grows(14, 0.8, 15.0), RL),
    (
        "all rewards are equal",
        "reward_of_length",
        [*grows(10, 0.9, 15.0), *[line(10, rollout__tokens_mean=15.0, rollout__truncated_fraction=0.3)] * 10],
        RL,
    ),
    ("both rise", "judge_blind_spot", evaluates((1, 5), (2, 6), (3, 7)), RL),
    ("one bad evaluation", "judge_blind_spot", evaluates((1, 5), (2, 6), (3, 4)), RL),
    ("both fall", "judge_blind_spot", evaluates((3, 5), (2, 4), (1, 3)), RL),
    ("one bad evaluation", "judges_disagree", evaluates(*[(1, 1)] * 3, corr=[0.8, 0.7, 0.2]), RL),
    ("never agreed", "judges_disagree", evaluates(*[(1, 1)] * 3, corr=[0.1, 0.0, 0.0]), RL),
    ("a few groups", "groups_without_signal", steps(20, "rollout/zero_std_groups", lambda i: 0.4), RL),
    ("one bad step", "groups_without_signal", steps(5, "rollout/zero_std_groups", lambda i: float(i == 4)), RL),
    ("too early", "groups_without_signal", steps(4, "rollout/zero_std_groups", lambda i: 1.0), RL),
    ("groups of one", "groups_without_signal", steps(9, "rollout/zero_std_groups", lambda i: 1.0), Settings()),
    ("supervised", "groups_without_signal", steps(9, "train/loss", lambda i: 1.0), Settings()),
    ("it falls slowly", "entropy_collapse", steps(15, "train/entropy", lambda i: 2.0 - 0.1 * i), RL),
    ("it is low from the start", "entropy_collapse", steps(40, "train/entropy", lambda i: 0.01), RL),
    ("no entropy is logged", "entropy_collapse", steps(40, "train/loss", lambda i: 0.01), RL),
    ("half is allowed", "clip_too_much", steps(20, "train/clip_frac", lambda i: 0.5), RL),
    ("it acts now and then", "clip_never", steps(20, "train/clip_frac", lambda i: 0.01 * (i == 3)), RL),
    ("one update: always 0", "clip_never", steps(20, "train/clip_frac", lambda i: 0.0), Settings(group_size=8)),
    ("no clip", "clip_never", steps(20, "train/loss", lambda i: 0.0), RL),
    ("rounding", "mismatch_grows", steps(15, "train/mismatch/kl", lambda i: 1e-9 if i < 5 else 1e-6), RL),
    ("steady", "mismatch_grows", steps(15, "train/mismatch/kl", lambda i: 0.02), RL),
    ("samples end by themselves", "length_budget", steps(20, "rollout/truncated_fraction", lambda i: 0.2), RL),
    ("small sets", "large_sets", steps(5, "rollout/kept_set_size_mean", lambda i: 200.0), RL),
    ("no truncation", "large_sets", steps(5, "train/lr", lambda i: 1.0), RL),
    ("half are accepted", "costly_drafts", steps(5, "rollout/accepted", lambda i: 0.5), RL),
    ("no drafts", "costly_drafts", steps(5, "train/lr", lambda i: 1.0), RL),
    ("warmed up", "warmup_at_end", steps(5, "train/lr", lambda i: min(1e-4 * (i + 1), 4e-4)), RL),
    ("decays", "warmup_at_end", steps(5, "train/lr", lambda i: 1e-4 / (i + 1)), RL),
]


@pytest.mark.parametrize(("rule", "lines", "words"), SPEAKS, ids=[rule for rule, _, _ in SPEAKS])
def test_a_rule_speaks_where_it_should(rule, lines, words):
    assert words in (ask(rule, lines) or "")


@pytest.mark.parametrize(("why", "rule", "lines", "settings"), SILENT, ids=[f"{r}: {w}" for w, r, _, _ in SILENT])
def test_a_rule_is_silent_where_it_should_be(why, rule, lines, settings):
    assert ask(rule, lines, settings) is None


def test_every_rule_speaks_on_one_history_and_is_silent_on_another():
    rules = {*DURING, *AT_END}
    assert {rule for rule, _, _ in SPEAKS} == rules == {rule for _, rule, _, _ in SILENT}


def test_both_clip_bounds_count_together():
    """0.3 of the tokens at the upper bound and 0.3 at the lower one are more than half."""
    lines = [line(i, train__clip_frac_high=0.3, train__clip_frac_low=0.3) for i in range(5)]
    assert "60% of the tokens" in (ask("clip_too_much", lines) or "")


def test_advice_is_given_once():
    adviser = Adviser(RL, steps=100)
    said = [adviser.read_line(line(i, rollout__zero_std_groups=1.0)) for i in range(30)]
    assert [len(new) for new in said] == [0] * 4 + [1] + [0] * 25
    assert list(adviser.given) == ["groups_without_signal"]


def test_the_warm_up_is_judged_at_the_end_only():
    adviser = Adviser(RL, steps=6)
    said = [[rule for rule, _ in adviser.read_line(line(i, train__lr=1e-4 * (i + 1)))] for i in range(6)]
    assert said == [[], [], [], [], [], ["warmup_at_end"]]


def test_a_long_run_remembers_its_beginning_and_its_end():
    """The rules see the first five lines and the last twenty, whatever lies between."""
    adviser = Adviser(RL, steps=10_000)
    for i in range(1000):
        adviser.read_line(line(i, train__entropy=2.0 if i < 990 else 0.1))
    assert len(adviser.first) == 5 and len(adviser.last) == LONG
    assert "entropy_collapse" in adviser.given
