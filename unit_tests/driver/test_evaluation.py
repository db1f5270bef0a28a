"""Estimates, intervals and tables of an evaluation against brute force; and the files of its samples."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import combinations, permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.eval_schema import EvalConfig
from core.errors import ProcessDied, RunStopped, UserError
from core.timing.clock import Clock
from core.types.samples import Prompt, Sample
from data_feeds.rows.eval_sets import PromptSet
from data_feeds.rows.invalid_rows import InvalidRows
from driver.evaluation.estimators import Estimate, choose_ks, estimate_means, majority_at_k, pass_at_k, pass_hat_k
from driver.evaluation.suites.answers import find_final_answer, list_boxes
from driver.evaluation.suites.display import format_table
from driver.evaluation.suites.generations import (
    WHOLE,
    Generation,
    PartWriter,
    copy_parts,
    describe_group,
    join_parts,
    list_parts,
    read_generations,
    restore_spend,
)
from driver.evaluation.suites.resume import find_samples
from driver.evaluation.suites.run import EvalRun
from driver.evaluation.suites.table import GradedPrompt, TableRow, make_table
from rollouts.scheduling.availability import ENGINE_GROUP, EngineAvailability
from rollouts.scheduling.judge_spend import JudgeSpend
from unit_tests.helpers.examples import sample_of

COUNTS = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("n", "c", "k"), COUNTS)
def test_pass_at_k_and_pass_hat_k_are_means_over_all_choices_of_k_samples(n, c, k):
    chosen = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(mean([float(any(one)) for one in chosen]), abs=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(mean([float(all(one)) for one in chosen]), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_they_are_unbiased(k):
    """The mean over all outcomes of five samples, with their probabilities, is the probability itself."""
    p, at, hat = 0.3, 0.0, 0.0
    for outcome in product([True, False], repeat=5):
        c = sum(outcome)
        weight = p**c * (1 - p) ** (5 - c)
        at += weight * pass_at_k(5, c, k)
        hat += weight * pass_hat_k(5, c, k)
    assert at == pytest.approx(1 - (1 - p) ** k) and hat == pytest.approx(p**k)


def test_a_large_n_is_exact():
    assert pass_at_k(4096, 0, 2048) == 0.0 and pass_at_k(4096, 2049, 2048) == 1.0
    assert pass_at_k(2048, 1, 1024) == 0.5


def vote(answers: tuple[str, ...], right: str) -> float:
    """The chance that a vote of all these is right, where ties are drawn by lot."""
    counts = Counter(answers)
    most = [a for a in counts if counts[a] == max(counts.values())]
    return (right in most) / len(most)


@pytest.mark.parametrize("answers", ["aaabc", "abcde", "aabbc", "bbbaa", "ab"])
def test_majority_at_k_is_unbiased(answers):
    """Its mean over all orders of the samples is the mean vote over all choices of k of them."""
    for k in range(1, len(answers) + 1):
        found = [majority_at_k(o, [x == "a" for x in o], k) for o in permutations(answers)]
        assert mean(found) == pytest.approx(mean([vote(one, "a") for one in combinations(answers, k)]))


def test_majority_counts_an_answer_that_passes_sometimes_by_its_fraction():
    assert majority_at_k(["a", "a", "b"], [True, False, True], 3) == 0.5
    assert majority_at_k(["b", "a"], [False, True], 2) == 0.5, "a tie is shared, whoever comes first"
    assert majority_at_k(["a"] * 5, [True, True, False, False, True], 2) == 0.5, "the fifth fills no block"


def test_intervals_are_the_percentiles_of_a_bootstrap_written_out():
    values = np.array([[0.0, 1.0], [1.0, 5.0], [0.5, 2.0], [1.0, 2.0]])
    draw = np.random.default_rng(7)
    means: list[list[float]] = [[], []]
    for _ in range(200):
        rows = [values[i] for i in draw.integers(4, size=4)]
        for column in (0, 1):
            means[column].append(mean([float(row[column]) for row in rows]))
    for column, found in enumerate(estimate_means(values, resamples=200, seed=7)):
        ordered = sorted(means[column])
        assert found.value == pytest.approx(mean([float(v) for v in values[:, column]]))
        for bound, percent in ((found.low, 2.5), (found.high, 97.5)):  # linear between two ranks
            at = percent / 100 * 199
            low, rest = ordered[int(at)], at - int(at)
            assert bound == pytest.approx(low + rest * (ordered[min(int(at) + 1, 199)] - low))


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        [found] = estimate_means((rng.random((80, 1)) < 0.4).astype(float), resamples=200, seed=trial)
        covered += found.low <= 0.4 <= found.high
    assert 0.90 <= covered / 300 <= 0.99


def graded(rng: random.Random, n: int, **labels: str) -> GradedPrompt:
    answers = [rng.choice("abc") for _ in range(n)]
    passes = [answer == "a" for answer in answers]
    return GradedPrompt(
        labels=labels, rewards=[2.0 * p for p in passes], passes=passes, answers=answers, players=[0] * n, failed=0
    )


def test_a_table_has_a_row_for_all_for_every_set_and_for_every_value():
    rng = random.Random(1)
    prompts = [graded(rng, 4, set=rng.choice("xy"), level=rng.choice(["2", "10"])) for _ in range(40)]
    prompts += [graded(rng, 2, set="z")]
    table = make_table(prompts, [1, 2, 4], by=["set", "level"], resamples=100, seed=0)
    names = [(row.column, row.value) for row in table]
    assert names == [("", "all"), ("set", "x"), ("set", "y"), ("set", "z"), ("level", "2"), ("level", "10")]
    assert (table[0].prompts, table[0].samples) == (41, 162)
    assert {*table[0].metrics} == {"mean", "pass@1", "pass@2", "pass^2", "majority@2"}, "z has two samples"
    for row in table[1:]:
        own = [p for p in prompts if p.labels.get(row.column) == row.value]
        assert row.prompts == len(own)
        for k in (1, 2, 4):
            if (name := f"pass@{k}") in row.metrics:
                each = [mean([float(any(c)) for c in combinations(p.passes, k)]) for p in own]
                assert row.metrics[name].value == pytest.approx(mean(each))
                assert row.metrics[name].low <= row.metrics[name].value <= row.metrics[name].high
        assert row.metrics["mean"].value == pytest.approx(2 * row.metrics["pass@1"].value)


def test_k_is_chosen_up_to_the_number_of_samples():
    assert [choose_ks(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"\boxed{1} and \boxed{\text{a {b}}}", r"\text{a{b}}"),
        (r"\boxed{3} \boxed{unclosed", "3"),
        ("work\n#### 1,234 \nbye", "1234"),
        ("between 3 and -4.5", "-4.5"),
        (" no  number\n", "nonumber"),
        (r"<think>\boxed{3}</think>So 4.", "4"),
        ("", ""),
        (r"\boxed{1,2}", "1,2"),
        (r"\boxed{1, 200}", "1,200"),
        (r"\boxed{ 1,200 }", "1200"),
        ("\\boxed{3 \n 1 / 2 \n a}", "3 1/2a"),
        ("of 1,2345", "2345"),
        ("costs 1,234,567.5 in all", "1234567.5"),
    ],
)
def test_the_final_answer_of_a_reply(reply, answer):
    assert find_final_answer(reply) == answer


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{\boxed{3}}", [r"\boxed{3}"]),
        (r"\boxed{a\boxed{1}b} or \boxed{2}", [r"a\boxed{1}b", "2"]),
        (r"\boxed{open \boxed{4}", ["4"]),
    ],
)
def test_a_box_within_a_box_is_no_answer_of_its_own(text, boxes):
    assert list_boxes(text) == boxes


def a_row(of_set: str, index: int, sample: int) -> Generation:
    return Generation(
        set=of_set,
        index=index,
        player=0,
        sample=sample,
        id=f"{of_set}/{index}",
        prompt="[]",
        row="0",
        answer="7",
        extra="{}",
        completion="7 é\n",
        final_answer="7",
        reward=None if index == 1 else 0.1 + sample,
        reward_parts='{"correct": 1.0}',
        failure="it broke" if index == 1 else "",
        stop="eos",
        tokens=3,
    )


def test_parts_become_one_file_in_order_and_nothing_is_lost(tmp_path):
    groups = [[a_row(of, i, s) for s in range(2)] for of, i in [("b", 2), ("a", 1), ("b", 0), ("a", 0), ("b", 1)]]
    writer = PartWriter(tmp_path, prompts_per_part=2)
    for group in groups[:3]:
        writer.add(group)
    assert len(list_parts(tmp_path)) == 1, "the third waits"
    (tmp_path / "generations" / "part_00009.parquet.partial").write_bytes(b"PAR1 half of a part")
    (tmp_path / "again").mkdir()
    copy_parts(tmp_path, tmp_path / "again")
    assert read_generations(list_parts(tmp_path / "again")) == [row for group in groups[:2] for row in group]
    again = PartWriter(tmp_path / "again", prompts_per_part=2)
    for group in groups[2:]:
        again.add(group)
    again.flush()
    again.flush()
    assert [p.name for p in list_parts(tmp_path / "again")] == [f"part_0000{i}.parquet" for i in range(3)]
    rows, whole = join_parts(tmp_path / "again", {"b": 0, "a": 1}), tmp_path / "again" / WHOLE
    assert whole.is_file() and not (tmp_path / "again" / "generations").exists()
    wanted = [a_row(of, i, s) for of, i in [("b", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 1)] for s in range(2)]
    assert read_generations([whole]) == rows == wanted
    assert pq.read_table(whole).column("reward").null_count == 4


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path):
    writer = PartWriter(tmp_path, prompts_per_part=1)
    writer.add([replace(a_row("a", 0, 0), id="x")])
    [part] = list_parts(tmp_path)
    pq.write_table(pq.read_table(part).drop_columns(["tokens"]), part)
    with pytest.raises(UserError, match=r"part_00000.parquet cannot be read .*tokens.* remove it, and its prompts"):
        read_generations([part])
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"part_00000.parquet cannot be read .* remove it, and its prompts"):
        read_generations([part])


def test_samples_serve_again_for_equal_rows_whatever_an_environment_adds(tmp_path: Path):
    spec = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    row = Prompt(id="s/0", messages=[{"role": "user", "content": "go"}], answer="7", extra={"level": 1}, tools=[spec])
    shown = replace(row, messages=[*row.messages, {"role": "user", "content": "you see a door"}], tools=[spec, spec])
    sample = sample_of([1, 2], [False, True], prompt=shown)
    writer = PartWriter(tmp_path, prompts_per_part=1)
    writer.add(describe_group([sample], row, of_set="s", index=0))
    settings: dict[str, dict] = {"settings": {}, "sha256": {}}

    def find(prompt: Prompt) -> list:
        one = PromptSet(name="s", prompts=[prompt], samples=1, invalid=InvalidRows(), form="ours", notes=[])
        return [*find_samples(str(tmp_path), settings, settings, [one]).done]

    assert find(row) == [("s", 0)]
    others = [{"tools": []}, {"messages": shown.messages}, {"answer": "8"}, {"extra": {"level": 2}}]
    for change in others:
        with pytest.raises(UserError, match="prompt s/0 of s is not what it was, so the file has changed"):
            find(replace(row, **change))


class Judged:
    """Requests of groups whose samples cost a judge's call each."""

    def __init__(self, n_engines: int, judges: JudgeSpend) -> None:
        self.engines, self.judges = EngineAvailability(n_engines), judges
        self.running, self.most = 0, 0
        self.before: Callable[[], Awaitable[None]] = self.yield_once

    async def yield_once(self) -> None:
        await asyncio.sleep(0)

    async def generate_group(self, ticket: int, prompt: Prompt, size: int) -> list[Sample]:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.before()
        self.running -= 1
        sample = replace(sample_of([1, 2], [False, True], prompt=prompt), reward=1.0, counts={"judge/calls": 1.0})
        self.judges.count([sample] * size)
        return [sample] * size


def an_evaluation(folder: Path, sets: dict[str, int], **reward: Any) -> tuple[EvalRun, list[str]]:
    """Return an evaluation of prompts without engines, two samples each, and the lines that it prints."""
    raw = {
        "name": "eval",
        "model": {"path": "models/tiny"},
        "data": {"sets": [{"path": f"{name}.jsonl"} for name in sets]},
        "reward": {"function": "arithmetic", **reward},
        "samples": 2,
        "resamples": 100,
        "prompts_per_engine": 1,
    }
    said: list[str] = []
    console = SimpleNamespace(say=said.append, is_live=False)
    context: Any = SimpleNamespace(folder=SimpleNamespace(path=folder), clock=Clock(), console=console, facts={})
    prompts = {name: [Prompt(id=f"{name}/{i}", messages=[]) for i in range(n)] for name, n in sets.items()}
    cfg = EvalConfig.model_validate(raw)
    run = EvalRun(
        cfg=cfg,
        sets=[
            PromptSet(name=name, prompts=of, samples=2, invalid=InvalidRows(), form="ours", notes=[])
            for name, of in prompts.items()
        ],
        requests=Judged(1, JudgeSpend(cfg.reward.judge_budget)),  # type: ignore[arg-type]
        context=context,
        writer=PartWriter(folder, prompts_per_part=2),
        done={},
    )
    return run, said


def test_a_small_set_may_not_fail_within_the_fraction_of_others(tmp_path: Path):
    rows = [[a_row("large", i, s) for s in range(2)] for i in range(2, 20)]
    rows += [[a_row("small", 1, s) for s in range(2)]]
    for name, fraction in (("stops", 0.1), ("goes_on", 1.0)):
        (tmp_path / name).mkdir()
        run, said = an_evaluation(tmp_path / name, {"large": 18, "small": 1}, max_failed_fraction=fraction)
        for row in rows:
            run.writer.add(row)
        run.writer.flush()
        if name == "stops":
            with pytest.raises(
                RunStopped, match=r"^small: 2 of 2 samples failed, more than .*=0\.1; the first: it broke"
            ):
                run.report()
    table = run.report()
    assert said[0] == "small: 2 of 2 samples failed and count as 0; the first: it broke"
    assert [(row.value, row.samples, row.failed) for row in table] == [
        ("all", 38, 2),
        ("large", 36, 0),
        ("small", 2, 2),
    ]


def test_a_merged_model_is_removed_if_samples_cannot_be_written(tmp_path: Path):
    run, _ = an_evaluation(tmp_path, {"a": 1})
    run.merged = tmp_path / "merged_model"
    run.merged.mkdir()
    run.writer.folder = tmp_path / "a_file"
    run.writer.folder.touch()
    with pytest.raises(RunStopped, match=r"part_00000\.parquet cannot be written"):
        asyncio.run(run.sample_all())
    assert not run.merged.exists()


def test_a_used_up_budget_of_judges_keeps_what_was_paid_for(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    run, _ = an_evaluation(first, {"a": 5}, judge_budget={"calls": 6})
    with pytest.raises(RunStopped, match=r"judge_budget\.calls=6 is used up, 6 were spent: resume with a larger one"):
        asyncio.run(run.sample_all())
    kept = read_generations(list_parts(first))
    assert [row.index for row in kept] == [0, 0, 1, 1, 2, 2], "the third prompt reached the limit, and is there"
    copy_parts(first, second)
    run, _ = an_evaluation(second, {"a": 5}, judge_budget={"calls": 10})
    run.done.update({("a", i): kept[2 * i : 2 * i + 2] for i in range(3)})
    asyncio.run(run.sample_all())
    assert run.requests.judges.calls == 10, "the six calls of the first are counted; the last prompt used up the rest"
    assert [row.samples for row in run.report()] == [10]


def test_what_judges_cost_is_written_with_each_part(tmp_path: Path):
    run, _ = an_evaluation(tmp_path, {"a": 5})
    requests: Any = run.requests
    found: list[tuple[int, float]] = []

    async def look() -> None:  # as a resume would, if the evaluation were killed here
        restore_spend(tmp_path, spend := JudgeSpend())
        found.append((len(list_parts(tmp_path)), spend.calls))

    requests.before = look
    asyncio.run(run.sample_all())
    assert found == [(0, 0), (0, 0), (1, 4), (1, 4), (2, 8)]


def test_as_many_prompts_run_as_all_engines_take(tmp_path: Path):
    run, _ = an_evaluation(tmp_path, {"a": 20})
    rollout = run.cfg.rollout.model_copy(update={"num_engines": 2})
    run.cfg = run.cfg.model_copy(update={"prompts_per_engine": 4, "rollout": rollout})
    requests: Any = run.requests
    asyncio.run(run.sample_all())
    assert requests.most == 8


def test_an_engine_that_was_restarted_serves_again_at_once(tmp_path: Path):
    run, _ = an_evaluation(tmp_path, {"a": 3})
    requests: Any = run.requests
    said: list[str] = []

    async def restart(rank: int) -> None:
        await asyncio.sleep(0)

    async def die_twice() -> None:
        if engines.n_restarts < 2:
            engines.report_death(ProcessDied("it died", worker=(ENGINE_GROUP, 0)), engines.deaths)
        await engines.wait_for(engines.serving)

    engines = requests.engines = EngineAvailability(1, restart=restart, budget=2, say=said.append)
    requests.before = die_twice
    asyncio.run(asyncio.wait_for(run.sample_all(), 10))
    assert said == [
        *("it died; restarting it (1 of rollout.restarts=2)", "engine 0 is back"),
        *("it died; restarting it (2 of rollout.restarts=2)", "engine 0 is back"),
    ]


def test_a_resumed_evaluation_counts_the_samples_that_are_there(tmp_path):
    run, said = an_evaluation(tmp_path, {"a": 5})
    run.done.update(
        {("a", i): [replace(a_row("a", i, sample), reward=0.5, failure="") for sample in range(2)] for i in range(3)}
    )
    asyncio.run(run.sample_all())
    assert said == [
        "resumed: the samples of 3 prompts are there",
        "4 of 5 prompts: mean 0.625",
        "5 of 5 prompts: mean 0.700",
    ]


def test_nothing_goes_on_once_an_evaluation_has_its_samples(tmp_path):
    run, _ = an_evaluation(tmp_path, {"a": 2})

    async def sample() -> set[asyncio.Task[Any]]:
        await run.sample_all()
        await asyncio.sleep(0)
        return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert asyncio.run(sample()) == set()


def test_the_table_has_a_column_for_each_metric_with_its_interval():
    some = Estimate(value=0.5, low=0.25, high=0.75)
    counts = {"samples": 4, "failed": 0}
    rows = [
        TableRow(column="", value="all", prompts=3, metrics={"mean": some, "pass@1": some}, **counts),
        TableRow(column="difficulty", value="hard", prompts=1, metrics={}, **counts),
    ]
    lines = format_table(rows, [1])
    assert [line.split() for line in lines] == [
        ["prompts", "of", "prompts", "mean", "pass@1"],
        ["all", "3", *["0.500", "[0.250,", "0.750]"] * 2],
        ["difficulty=hard", "1", "-", "-"],
    ]
    assert len({len(line) for line in lines}) == 1
