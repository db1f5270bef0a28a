"""Every metric that is logged is declared in core/metrics.py, and every one that is declared is logged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import main_rl
import main_sl
from algs import find_algorithm, list_algorithms
from algs.base import PolicyGradient
from algs.check import fixtures
from algs.check.update import compute_advantages, make_policy, plan_batches
from algs.objective import compute_objective
from algs.ops import reaches_cap, reaches_clamp
from configs.schema import RLConfig, SLConfig
from configs.trainer_schema import StopWhenConfig
from core.metrics import METRICS, MISMATCH_RATIO_SQ, VALUE_MOMENTS, find_metric
from core.timing.clock import Clock
from core.timing.phases import Phase
from driver.checks.metric_names import check_metric_names
from driver.load_recipe import load_recipe
from driver.records.console import Console
from driver.records.episode_metrics import measure_counts
from driver.records.judge_metrics import measure_judges, measure_second
from driver.records.rollout_metrics import measure_groups
from rollouts.scheduling.judge_spend import JudgeSpend
from tools.benchmarks import rl_ceiling, rl_vs_trl, rl_work
from trainers.compiled import CompileMetrics
from trainers.weight_sync.base import Delivery, Probe, Sent
from trainers.weight_sync.delta import Changes
from trainers.weight_sync.publisher import prove
from unit_tests.helpers.examples import run_here, some_groups
from unit_tests.helpers.runs import folder_of
from unit_tests.helpers.sampled_play import SYNC, play
from unit_tests.helpers.variants import NEEDED

DIGITS = "def score(prompt, messages):\n    return {'digits': sum(map(str.isdigit, messages[-1]['content'])) / 8}\n"
PAIRS = [{"messages": f"{i} plus 1", "chosen": f"{i + 1}", "rejected": "no"} for i in range(6)]
COUNTS = dict.fromkeys(
    [
        *("turns", "tool_calls", "tool_seconds", "tool_errors", "tool_errors/raised", "anything"),
        *("assistant/repeated", "assistant/rewritten", "tokens/sampled", "tokens/kept"),
        *("agent/timeouts", "agent/slow"),
        *("drafts/drafted", "drafts/accepted", "game/won", "game/drawn"),
        "game/opponent_version",
    ],
    1.0,
)
"""What environments, tools and agents count; their own tests have runs that do."""
JUDGED = {
    f"judge/{name}": 1.0 for name in ("calls", "cached", "unreadable", "votes", "agreed", "anchors", "anchor_errors")
}
"""What a judge counts."""
SCORED = [{"messages": f"{i} plus 1", "completions": [f"{i + 1}", "no"], "rewards": [1.0, 0.0]} for i in range(6)]
UNPAIRED = [{"messages": f"{i} plus 1", "label": i % 2 == 0} for i in range(6)]


def metrics_of_algorithm(name: str) -> set[str]:
    """Return the names that a trainer logs for an algorithm, with a KL term and an entropy bonus where it has them."""
    cls = find_algorithm({"name": name})[1]
    plain = not issubclass(cls, PolicyGradient) or name == "by_source"  # which has these settings by source
    extra = {} if plain else {"entropy_coef": 0.1, "kl": {"coef": 0.1}}
    alg = cls(**NEEDED.get(name, {}), **extra)
    world = fixtures.made_up_step(alg)
    [batch] = plan_batches(alg, compute_advantages(alg, world.groups, stale=True), world.now)
    values = world.now["values"][batch.labels]
    logged = {"loss"}
    if alg.model_kind == "policy":
        found = compute_objective(alg, make_policy(alg, batch, world.now), batch)
        logged |= found.metrics.keys() | {name for _, metrics in found.of_terms for name in metrics}
    if alg.value_lr is not None or alg.model_kind == "reward":
        logged |= alg.value_loss(values, batch.tokens)[1].keys()
    if alg.value_lr is not None:
        logged |= {"value/loss", "value/grad_norm"}
    # the made-up step's data set has no name
    return {f"train/{metric}".replace("//", "/unnamed/") for metric in logged}


def metrics_of_run(folder: Path) -> set[str]:
    return {name for line in (folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}


@pytest.fixture(scope="module")
def logged_by_algorithms() -> set[str]:
    return {metric for name in list_algorithms() for metric in metrics_of_algorithm(name)}


def test_algorithms_log_declared_metrics_only(logged_by_algorithms):
    intermediate = {MISMATCH_RATIO_SQ, *VALUE_MOMENTS}
    assert {name for name in logged_by_algorithms - intermediate if find_metric(name) is None} == set()


def test_a_condition_on_any_metric_of_an_algorithm_is_accepted(recipe):
    for name in list_algorithms():
        spec, cls = find_algorithm({"name": name})
        kind, config = ("rl", RLConfig) if issubclass(cls, PolicyGradient) else ("sl", SLConfig)
        cfg = load_recipe(config, recipe(kind=kind), []).cfg
        for metric in metrics_of_algorithm(name) - {MISMATCH_RATIO_SQ, *VALUE_MOMENTS}:
            asked = cfg.model_copy(update={"stop_when": StopWhenConfig(metric=metric, above=1.0)})
            check_metric_names(asked, cls(**NEEDED.get(name, {})), spec)


def test_runs_log_what_is_declared_and_nothing_else(
    recipe, tmp_path, sums, mixture_path, logged_by_algorithms, one_thread
):
    """Runs of both programs that use what puts a metric into the log; the algorithms' own metrics come from above."""
    train = str(sums / "train.parquet")
    mixture = [{"path": train, "name": "a"}, {"path": train, "name": "b", "ratio": 2}]
    rl = {"data.train": mixture, "data.eval": str(sums / "eval.parquet"), "eval_every": 1, "max_staleness": 1}
    rl |= {"eval_samples": 2}
    (tmp_path / "digits.py").write_text(DIGITS)
    rl |= {"reward.function": str(tmp_path / "digits.py"), "reward.weights": {"digits": 1.0}}
    rl |= {
        "alg": {
            "name": "ppo",
            "critic_lr": 1e-3,
            "correction": {"max_drift": 0.1},
            "adaptive_entropy": {"target": 1.0},
        },
        "steps": 3,
        "checkpoint": {"every": 1},
        "updates_per_step": 2,
    }
    rl["alg"]["schedules"] = {"clip_high": {"start": 0.1, "end": 0.2, "steps": 2}}
    rl |= {"capture": {"every": 1}, "compare_losses": ["cispo"]}
    assert run_here(main_rl, "--config", recipe(rl), "name=rl") == (0, "")
    turns = {"placement": "colocate", "steps": 1, "rollout.top_k": 20}
    turns |= {"model.path": mixture_path, "rollout.router_replay": "watch"}
    assert run_here(main_rl, "--config", recipe(turns), "name=turns") == (0, "")
    sft = str(sums / "sft.parquet")
    sl = {"data.train": [{"path": sft, "name": "a"}, {"path": sft, "name": "b"}], "data.eval": sft, "eval_every": 1}
    assert run_here(main_sl, "--config", recipe(sl, kind="sl"), "name=sl") == (0, "")
    kinds = [("pairs", "orpo", PAIRS), ("unpaired", "kto", UNPAIRED), ("binary", "bco", UNPAIRED)]
    for name, alg, rows in (*kinds, ("scored", "offline_dro", SCORED)):
        file = tmp_path / f"{name}.jsonl"
        turns = [row | {"messages": [{"role": "user", "content": row["messages"]}]} for row in rows]
        if name not in ("pairs", "scored"):
            turns = [row | {"messages": [*row["messages"], {"role": "assistant", "content": "2"}]} for row in turns]
        file.write_text("\n".join(map(json.dumps, turns)))
        changes = {"data.train": str(file), "data.eval": str(file), "eval_every": 1, "alg": {"name": alg}}
        assert run_here(main_sl, "--config", recipe(changes, kind="sl"), f"name={name}") == (0, "")
    by_runs = {
        m
        for name in ("rl", "turns", "sl", "pairs", "unpaired", "binary", "scored")
        for m in metrics_of_run(folder_of(tmp_path, name))
    }
    assert {name for name in by_runs if find_metric(name) is None} == set()
    everything = by_runs | logged_by_algorithms | {*measure_counts([replace(some_groups()[0][0], counts=COUNTS)])}
    judged = replace(some_groups()[0][0], counts=JUDGED, notes=[{"by": "j", "text": "7", "seconds": 0.5}])
    spend = JudgeSpend()
    spend.count([judged])
    everything |= {*measure_judges([judged]), *spend.measure()}
    everything |= {*measure_groups([[judged, fixtures.as_demonstration(judged)]])}
    everything |= {*play(SYNC, "thompson", seed=0)[1][-1]}
    sent = Sent(checksums={}, nbytes=1, changes=Changes(values=2, changed=1, tensors=1))
    delivery = Delivery(version=1, engines=[0], sent=sent, loaded=[[{}]], expected_logp=[-1.0])
    everything |= {*prove(delivery, [[-1.0]], Probe(token_ids=[1, 2], bound=1.0))}
    alone = SimpleNamespace(device="cpu", find_largest=lambda value: value)
    everything |= {f"train/{name}" for name in CompileMetrics(alone).finish()}
    second = [replace(judged, reward=r, counts={"second/failed": 0.0, "second/mean": r}) for r in (0.0, 1.0)]
    everything |= {f"eval/{name}" for name in measure_second([second])}
    assert {metric.name for metric in METRICS if not any(map(metric.matches, everything))} == set()


def test_a_name_that_is_not_declared_is_found():
    assert find_metric("rollout/old_name") is None
    assert find_metric("reward/anything").name == "reward/<part>"
    assert find_metric("reward/mean").name == "reward/mean", "the exact name comes first"
    assert find_metric("reward/two/parts") is None


def test_the_step_benchmark_reads_the_phases_of_two_steps(tmp_path):
    """Worked out by hand: steps of 10 s, of which 3 s of waiting for data, 5 s of training, 1 s of sync."""
    row = {
        "time/step_s": 10.0,
        "time/wait_for_data_s": 3.0,
        "time/train_s": 5.0,
        "time/sync_s": 1.0,
        "time/rest_s": 1.0,
    }
    rows = [{"time/step_s": 99.0}, row, row | {"time/logp_s": 0.5, "time/rest_s": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ours = rl_work.read_phases(tmp_path)
    assert ours[Phase.WAIT_FOR_DATA] == 3.0 and ours[Phase.TRAIN] == 5.0 and ours[Phase.LOGP] == 0.25


def test_a_phase_that_no_run_logs_stops_the_step_benchmark(tmp_path):
    rows = [{"time/step_s": 1.0, "time/generate_s": 1.0}] * 2
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(SystemExit, match="time/generate_s"):
        rl_work.read_phases(tmp_path)


def test_the_benchmark_beside_trl_names_every_goal_that_is_missed(capsys):
    """Worked out by hand: a step of 10 s, of which 3 s of generation, 6 s of training and 1 s of the rest."""
    ours = {"wait_for_data": 3.0, "train": 6.0, "sync": 1.0, "step": 10.0}
    seconds = {"ours": [10.0, 8.0, 12.0], "ours, off": [16.0], "TRL": [25.0], "generate": [3.0], "train": [13.0]}
    sides = {name: rl_vs_trl.Measured(seconds=taken) for name, taken in seconds.items()}
    sides["generate-once"] = rl_vs_trl.Measured(seconds=[2.75])
    sides["train-once"] = rl_vs_trl.Measured(seconds=[5.0])
    sides["ours"].phases, sides["ours"].rewards, sides["ours"].lengths = [ours], [0.0, 0.5, 1.0], [3.0, 4.0, 5.0]
    assert rl_vs_trl.find_missed(sides, "short") == []
    out = capsys.readouterr().out
    assert "TRL / ours: 2.50" in out and "same layout: 1.00" in out
    assert "ceiling with each prompt once: 1.29" in out and "vLLM with each prompt once: 1.09" in out
    assert rl_vs_trl.find_missed(sides, "long") == ["missed: TRL / ours"]
    sides["generate"].seconds = [2.0]
    assert rl_vs_trl.find_missed(sides, "short") == ["missed: our generation / bare vLLM"]
    sides["generate-once"].seconds = [2.0]
    assert rl_vs_trl.find_missed(sides, "short") == [
        "missed: ours / ceiling with each prompt once",
        "missed: our generation / bare vLLM",
    ]
    table = rl_vs_trl.make_table(sides, trl_batch=16)
    [line] = [line for line in table.splitlines() if line.startswith("ours  ")]
    assert line.split() == ["ours", "10.00", "8.00", "12.00", "0.50", "4.00"]
    assert "wait_for_data 3.00 s" in table and "3 steps of each" in table


@pytest.mark.parametrize("work", ["short", "long"])
def test_the_ceilings_train_the_tokens_of_the_run_in_either_layout(work):
    """Every token of a completion has one position that predicts it, and only tokens before it are seen there."""
    step = [(5, [3, 1, 2]), (4, [2, 2, 2])]
    for rows_of, rows in ((rl_ceiling.rows_of_samples, 6), (rl_ceiling.rows_of_groups, 2)):
        made = list(rows_of(step, rl_work.WORKLOADS[work].micro_batch_tokens))
        assert sum(len(at) for _, at in made) == 12 and sum(len(i["input_ids"]) for i, _ in made) == rows
    [(inputs, at)] = made
    mask, positions = inputs["attention_mask"][:, 0], inputs["position_ids"]
    for row, column, _ in at:
        seen = positions[row][mask[row, column]]
        assert sorted(seen.tolist()) == list(range(int(positions[row, column]) + 1)), "each position before it, once"


def test_a_column_that_comes_later_gets_its_heading(capsys):
    """The first update may be skipped: its line has neither a loss nor a gradient."""
    console = Console(3, Clock(), live=False)
    console.show_step({"step": 0.0, "reward/mean": 0.5})
    console.show_step({"step": 1.0, "reward/mean": 0.5, "train/loss": 0.25})
    console.show_step({"step": 2.0, "reward/mean": 0.5})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["step", "reward"],
        ["0", "0.500"],
        ["step", "reward", "loss"],
        ["1", "0.500", "0.2500"],
        ["2", "0.500", "-"],
    ]


def test_tokens_at_the_bounds_of_ratio_and_k3_are_counted():
    logp, prox, rollout = (torch.tensor(x) for x in ([0.0, -25.0, 0.0, -1.0], [0.0, 0.0, 0.0, -1.0], [0.0, 0, -20, -2]))
    assert reaches_clamp(logp, prox, rollout).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert reaches_cap(torch.tensor([-12.0, -9.0, 12.0]), torch.zeros(3)).tolist() == [1.0, 0.0, 0.0]
