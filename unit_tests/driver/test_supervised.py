"""Whole runs of main_sl.py on pairs and labelled answers, in this process; and a reward model that then rewards."""

import json
import random
from pathlib import Path

import pytest
import yaml

import main_rl
import main_sl
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from data_prep import hh_rlhf
from driver.context import RunContext, run_in_context
from driver.load_recipe import load_recipe
from driver.rl.setup import prepare as prepare_rl
from driver.rl.setup import start as start_rl
from driver.sl.run import Run, prepare, start
from unit_tests.helpers.runs import TIMED, evaluations_of, file_of, metrics_of
from unit_tests.helpers.sentences import tell

pytestmark = [pytest.mark.one_core, pytest.mark.timeout(400)]
HH = Path(__file__).parents[1] / "data" / "hh_rlhf_rows.jsonl"


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(tmp_path: Path, model: str, *, lora: dict | None = None, **changes) -> str:
    """A change to None leaves the key out."""
    recipe = {
        "name": "rows",
        "steps": 3,
        "rows_per_step": 8,
        "backend": "local",
        "run_dir": str(tmp_path / "runs"),
        "model": {"path": model, "dtype": "float32", "lora": lora},
        "alg": {"name": "dpo"},
        "trainer": {"lr": 1e-3, "micro_batch_tokens": 4096},
    }
    recipe |= {key: value for key, value in changes.items() if value is not None}
    recipe = {key: value for key, value in recipe.items() if key not in changes or changes[key] is not None}
    path = tmp_path / f"recipe_{len(list(tmp_path.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def learn(recipe: str) -> tuple[list[dict], dict]:
    """Metrics of every step and summary.json of a run of main_sl.py."""
    prepared = prepare(load_recipe(SLConfig, recipe, []))

    async def body(context: RunContext) -> None:
        await main_sl.train(await start(prepared, context))

    run_in_context(prepared.loaded.cfg, body)
    return said_of(prepared.loaded.cfg.run_dir)


def said_of(run_dir: str) -> tuple[list[dict], dict]:
    run = max(Path(run_dir).iterdir(), key=lambda p: p.stat().st_mtime_ns)
    return metrics_of(run), json.loads((run / "summary.json").read_text()) | {"run": run}


@pytest.fixture(scope="module")
def hh(tmp_path_factory) -> Path:
    """Real pairs, in our columns."""
    path = tmp_path_factory.mktemp("hh") / "pairs.parquet"
    hh_rlhf.main(["--split", "test", "--out", str(path), "--from", str(HH), "--limit", "40"])
    return path


def data_of(path: Path, **more) -> dict:
    return {"train": str(path), "max_tokens": 1000} | more


@pytest.mark.slow
@pytest.mark.parametrize(
    "alg",
    [
        pytest.param({"name": "dpo"}, marks=pytest.mark.usual),
        {"name": "orpo"},
        {"name": "dpo", "form": "ipo", "length_norm": True},
    ],
)
def test_a_run_on_real_pairs_learns_them(tmp_path, tiny_path, hh, alg):
    data = data_of(hh, eval=str(hh), eval_rows=8)
    trainer = {"lr": 3e-3, "micro_batch_tokens": 4096}
    _, summary = learn(recipe_of(tmp_path, tiny_path, alg=alg, data=data, steps=6, eval_every=3, trainer=trainer))
    assert summary["after"]["eval/loss"] < summary["before"]["eval/loss"]
    if alg["name"] == "dpo":  # ORPO's likelihood of the chosen answers comes first
        assert summary["after"]["eval/pair/margin"] > summary["before"]["eval/pair/margin"]
    evaluations = evaluations_of(summary["run"])
    assert [*evaluations] == [0, 3, 6] and "eval/pair/accuracy" in evaluations[3]


@pytest.mark.slow
def test_a_reference_scored_ahead_gives_the_same_run(tmp_path, tiny_path, hh):
    losses = {}
    for ahead in (False, True):
        metrics, _ = learn(recipe_of(tmp_path, tiny_path, data=data_of(hh), precompute_ref_logp=ahead))
        losses[ahead] = [m["train/loss"] for m in metrics]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[True][0] == pytest.approx(0.693147, abs=1e-5)


def test_kto_learns_from_labels_alone(tmp_path, tiny_path):
    rows = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": "ab"[i % 2] * 3}],
            "label": i % 2 == 0,
        }
        for i in range(16)
    ]
    path = tmp_path / "labelled.jsonl"
    write_rows(path, rows)
    metrics, summary = learn(
        recipe_of(
            tmp_path,
            tiny_path,
            alg={"name": "kto"},
            data={"train": str(path), "eval": str(path), "max_tokens": 64},
            steps=10,
        )
    )
    assert metrics[0]["train/kto/z0"] == 0 and metrics[0]["train/loss"] == pytest.approx(0.5)
    assert summary["after"]["eval/kto/accuracy"] > 0.9


def some_pairs(path: Path, n: int, *, seed: int) -> Path:
    """Replies of eight digits, of which the one with more sevens is chosen."""
    rng = random.Random(seed)

    def reply() -> str:
        return "".join(rng.choice("7777012345689") for _ in range(8))

    rows = []
    while len(rows) < n:
        a, b = sorted((reply(), reply()), key=lambda text: text.count("7"))
        if b.count("7") > a.count("7"):
            prompt = [{"role": "user", "content": f"{rng.randrange(100)}?"}]
            rows.append({"id": str(len(rows)), "messages": prompt, "chosen": b, "rejected": a})
    write_rows(path, rows)
    return path


def said(metrics: dict) -> dict:
    """Return what does not depend on the clock."""
    return {k: v for k, v in metrics.items() if not k.startswith(TIMED)}


def test_every_step_draws_the_next_rows(recipe):
    """Fifteen rows, five a step: three steps are a pass, whatever was drawn before."""
    prepared = prepare(load_recipe(SLConfig, recipe({"steps": 6}, kind="sl"), []))
    parts = dict.fromkeys(Run.__dataclass_fields__)  # drawing asks for none of the others
    run = Run(**parts | {"cfg": prepared.loaded.cfg, "rows": prepared.rows})
    drawn = [[group[0].prompt.id for group in run.draw_rows(step)] for step in range(6)]
    assert run.draw_rows(4)[0] is prepared.rows.draw(20)
    for a_pass in (drawn[:3], drawn[3:]):
        assert sorted(row for step in a_pass for row in step) == sorted(g[0].prompt.id for g in prepared.rows.all())


def test_a_mixture_goes_on_in_the_middle_of_a_pass(tmp_path, tiny_path):
    """Seven and three rows at 2:1, three a step: every source is within a pass when the run stops after two steps."""
    for name, n in (("long", 7), ("short", 3)):
        turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}" * 3}] for i in range(n)]
        write_rows(tmp_path / f"{name}.jsonl", [{"id": str(i), "messages": turns[i]} for i in range(n)])
    sources = [{"path": str(tmp_path / "long.jsonl"), "ratio": 2}, {"path": str(tmp_path / "short.jsonl")}]
    mixed = {"alg": {"name": "sft"}, "data": {"train": sources, "max_tokens": 32}, "rows_per_step": 3}
    whole, _ = learn(recipe_of(tmp_path, tiny_path, **mixed, steps=4))
    assert [m["data/long/rows"] for m in whole] == [2, 4, 6, 8] and [m["data/short/rows"] for m in whole] == [
        1,
        2,
        3,
        4,
    ]
    for m in whole:  # each source's loss, over its share of the tokens, makes the loss
        low, high = sorted((m["train/loss/long"], m["train/loss/short"]))
        assert low <= m["train/loss"] <= high
    _, first = learn(recipe_of(tmp_path, tiny_path, **mixed, steps=2, checkpoint={"every": 2}))
    rest, _ = learn(recipe_of(tmp_path, tiny_path, **mixed, steps=4, resume=str(first["run"])))
    assert [said(m) for m in rest] == [said(m) for m in whole[2:]]


@pytest.mark.slow
def test_a_reward_model_learns_and_then_rewards(tmp_path, tiny_path):
    """It is trained on pairs, saved, and leads an RL run to what the pairs preferred."""
    pairs, held_out = (
        some_pairs(tmp_path / "pairs.jsonl", 400, seed=0),
        some_pairs(tmp_path / "eval.jsonl", 100, seed=1),
    )
    _, summary = learn(
        recipe_of(
            tmp_path,
            tiny_path,
            alg={"name": "reward_model", "center": 0.01},
            data={"train": str(pairs), "eval": str(held_out), "max_tokens": 64},
            steps=40,
            rows_per_step=64,
            trainer={"lr": 2e-3, "warmup_updates": 5},
        )
    )
    assert summary["before"]["eval/pair/accuracy"] == 0, "its head begins at zero, and a tie is not right"
    assert summary["after"]["eval/pair/accuracy"] > 0.95
    model = summary["run"] / "model"
    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, [{"id": str(i), "messages": [{"role": "user", "content": f"{i}?"}]} for i in range(20)])
    recipe = recipe_of(
        tmp_path,
        tiny_path,
        name="rewarded",
        rows_per_step=None,
        alg={"name": "grpo"},
        steps=12,
        groups_per_step=4,
        group_size=16,
        reward={
            "function": "reward_model",
            "settings": {"model": str(model)},
            "weights": {"reward": 1.0},
            "workers": 1,
        },
        rollout={"engine": "hf", "max_new_tokens": 8},
        data={"train": str(prompts), "max_prompt_tokens": 32},
        trainer={"lr": 1e-2},
    )
    prepared = prepare_rl(load_recipe(RLConfig, recipe, []))

    async def body(context: RunContext) -> None:
        await main_rl.train(await start_rl(prepared, context))

    run_in_context(prepared.loaded.cfg, body)
    metrics, summary = said_of(str(tmp_path / "runs"))
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 1
    said = [
        json.loads(line)["completion"]
        for line in (summary["run"] / "samples" / "step_00011.jsonl").read_text().splitlines()
    ]
    assert sum(text.count("7") for text in said) / len(said) > 4, said[:3]


def test_completions_that_fit_no_micro_batch_are_refused_at_the_start(tmp_path, tiny_path):
    row = {"messages": [{"role": "user", "content": "?"}]}
    rows = [row | {"completions": ["7" * 90] * n, "rewards": [0.5] * n} for n in (2, 8)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "x.jsonl"), "max_tokens": 100}
    how = {"alg": {"name": "offline_dro"}, "data": data, "trainer": {"micro_batch_tokens": 300}}
    with pytest.raises(UserError, match=r"^row 1: the samples of a group have .* trainer.micro_batch_tokens=300"):
        prepare(load_recipe(SLConfig, recipe_of(tmp_path, tiny_path, **how), []))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"alg": {"name": "grpo"}}, "^alg grpo trains on samples: run it with main_rl.py$"),
        ({"alg": {"name": "kto"}, "rows_per_step": 1}, "rows_per_step=1 leaves no other row's completion"),
        ({"alg": {"name": "kto"}, "precompute_ref_logp": True}, "precompute_ref_logp cannot be"),
        ({"alg": {"name": "sft"}, "precompute_ref_logp": True}, "uses no reference"),
        ({"alg": {"name": "reward_model"}, "lora": {"r": 4}}, "a reward model is trained whole"),
        ({"trainer": {"micro_batch_tokens": 1500}}, "raise that to 2000"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, tiny_path, hh, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        prepare(load_recipe(SLConfig, recipe_of(tmp_path, tiny_path, data=data_of(hh), **changes), []))


MINE = """
from algs.dpo import DPO
from algs.teachers import Teacher
from core.types.measures import Measure

class Mine(DPO):
    {} = property(lambda self: {})
"""
READS = '{"gap": Measure(lambda s, at: at.teacher("ref_logp")[..., 0], ("ref_logp",))}'
MOVES = 'super(Mine, self).teachers | {"x": Teacher("start", ema=0.1)}'
TELLS = 'super(Mine, self).teachers | {"x": Teacher("start", prompt=print)}'


def test_references_and_teachers_of_given_rows_are_refused_in_whole(tmp_path, tiny_path):
    reads, moves, tells = (
        {"file": file_of(tmp_path / f"mine_{n}.py", MINE.format(name, found))}
        for n, (name, found) in enumerate((("measures", READS), ("teachers", MOVES), ("teachers", TELLS)))
    )
    pair = {"prompt": [{"role": "user", "content": "?"}], "chosen": "7", "rejected": "8"}
    (rows := tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    lazy = {"train": [{"path": str(rows), "name": "mine", "lazy": True}], "max_tokens": 100}
    follows = "alg has a teacher that follows the policy or has a prompt: run it with main_rl.py"
    for changes, sentence in (
        (
            {"data": lazy, "precompute_ref_logp": True},
            "precompute_ref_logp computes all rows before the start, and mine is lazy: leave it out",
        ),
        (
            {"alg": reads, "precompute_ref_logp": True},
            "precompute_ref_logp keeps one number per token, and this algorithm reads the reference's distribution: "
            "leave it out",
        ),
        ({"alg": moves}, follows),
        ({"alg": tells}, follows),
    ):
        recipe = recipe_of(tmp_path, tiny_path, **{"data": lazy} | changes)
        assert tell(lambda recipe=recipe: prepare(load_recipe(SLConfig, recipe, []))) == sentence
