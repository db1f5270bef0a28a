"""What engines, opponents and judges are built from, and what is tried of rewards and games before the start."""

from __future__ import annotations

import asyncio
import os
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.eval_schema import EvalConfig
from configs.judge_schema import JudgeConfig
from configs.schema import RLConfig
from core.cluster.capacity import Resources, Role
from core.cluster.ray_workers import Remote
from core.cluster.workers import RankInfo
from core.errors import ProcessDied, RunStopped
from core.types.samples import Prompt
from core.types.truncation import Truncation
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.load_recipe import load_recipe
from driver.start import devices
from driver.start.devices import list_cores
from driver.start.judges import Judges, find_judge_length, name_judge_model, plan_judge, plan_judge_roles, start_judges
from driver.start.opponent import build_opponent, check_game, configure_opponent
from driver.start.rollouts import build_engine, check_reward_and_env, find_longest, plan_engines, plan_rollouts
from driver.start.weight_sync import make_probe
from rollouts.allowed_tokens import resolve_allowed_tokens
from rollouts.engines.base import EngineConfig
from rollouts.judges.endpoint import Served
from rollouts.judges.worker import JudgePlan, JudgeWorker
from rollouts.registry import resolve_engine, resolve_env
from unit_tests.helpers.runs import ROOT, file_of
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]


def load(recipe: Recipe, changes: dict[str, Any] | None = None) -> RLConfig:
    return load_recipe(RLConfig, recipe(changes or {}), []).cfg


def with_rollout(cfg: Any, **keys: Any) -> Any:
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=keys)})


def test_an_engine_is_planned_from_the_keys_of_its_recipe(recipe: Recipe, tiny_path: str):
    changes = {"seed": 5, "rollout.temperature": 0.7, "data.max_prompt_tokens": 30, "rollout.max_new_tokens": 9}
    changes |= {"rollout.top_p": 0.9, "rollout.top_k": 7, "rollout.min_p": 0.1, "rollout.kv_cache_gib": 2.0}
    changes |= {"rollout.gpu_memory_utilization": 0.5, "rollout.enforce_eager": True, "weight_sync.timeout_s": 20.0}
    cfg = load(recipe, changes)
    planned = plan_engines(cfg, cfg.model).engine
    assert planned == EngineConfig(
        **{"model_path": tiny_path, "dtype": "float32", "seed": 5, "temperature": 0.7, "max_model_len": 39},
        **{"truncation": Truncation(min_p=0.1, top_k=7, top_p=0.9), "stop_token_ids": (), "kv_cache_gib": 2.0},
        **{"gpu_memory_utilization": 0.5, "enforce_eager": True, "prefix_cache": True, "starts_empty": False},
    )
    other = cfg.model.model_copy(update={"path": "x", "dtype": "bfloat16", "images": "off", "trust_remote_code": True})
    assert plan_engines(cfg, other).engine == replace(
        planned, model_path="x", dtype="bfloat16", images="off", trust_remote_code=True
    )
    keys = {"tensor_parallel_size": 2, "quantization": "int8", "batch_invariant": True}
    wide = with_rollout(cfg, **keys, vllm={"max_num_seqs": 3})
    assert plan_engines(wide, cfg.model).engine == replace(planned, **keys, options={"max_num_seqs": 3})
    of_run = replace(planned, starts_empty=True, timeout_s=20.0)
    assert plan_rollouts(cfg).engine == of_run
    pauses = cfg.weight_sync.model_copy(update={"pause_mode": "wait"})
    shared = cfg.model_copy(update={"weight_sync": pauses, "placement": "colocate"})
    assert plan_rollouts(with_rollout(shared, router_replay="watch")).engine == replace(
        of_run, pause_mode="wait", sleep="offload", routes=True
    )
    plan = plan_rollouts(cfg)
    assert (plan.seed, plan.max_prompt_tokens, plan.transports) == (5, 30, ("gloo", "direct", "disk"))
    assert plan_rollouts(with_rollout(cfg, num_engines=3)).reward_functions.run.engines == 3


def test_engines_of_a_policy_that_judges_have_room_for_its_requests(recipe: Recipe):
    cfg = load(recipe)
    for judge, longest in (
        (None, 40),
        (JudgeConfig(model="policy", max_model_len=100), 100),
        (JudgeConfig(model="policy", max_model_len=20), 40),
        (JudgeConfig(model="policy"), 256),
        (JudgeConfig(model="m"), 40),
    ):
        assert find_longest(cfg.model_copy(update={"judge": judge})) == longest


KEEPING = """
from rollouts.engines.hf import HfEngine

class Keeping(HfEngine):
    def __init__(self, config):
        self.config = config
"""


def test_an_engine_ends_and_restricts_replies_as_the_recipe_says(recipe: Recipe, tmp_path: Path):
    cfg = load(recipe, {"rollout.stop": ["7"], "rollout.allowed_tokens": ["1", "2"]})
    keeping = resolve_engine(file_of(tmp_path / "keeping.py", KEEPING))
    for skips in (True, False):
        plan = replace(plan_rollouts(with_rollout(cfg, skip_special_tokens=skips)), engine_spec=keeping)
        engine, tokenizer, stops = build_engine(plan, plan.engine)
        assert tokenizer.skip_special_tokens == skips and stops.strings is not None
        allowed = resolve_allowed_tokens(tokenizer, ["1", "2"], stops.token_ids)
        given: Any = engine
        assert given.config == replace(
            plan.engine, stop_token_ids=stops.token_ids, stop_strings=stops.strings, allowed_tokens=allowed
        )
        assert not allowed.is_everything


def test_both_rewards_know_the_folder_of_the_run(recipe: Recipe):
    cfg = load(recipe)
    alone, both = (plan_rollouts(cfg.model_copy(update={"eval_reward": one})) for one in (None, cfg.reward))
    for plan, earlier in ((alone, None), (both, Path("/old"))):
        moved = plan.in_folder(Path("/new"), earlier)
        found = [one.run for one in (moved.reward_functions, moved.eval_functions) if one is not None]
        assert len(found) == (1 if plan is alone else 2)
        for run in found:
            assert (run.folder, run.earlier_folder) == ("/new", None if earlier is None else "/old")
        assert plan.reward_functions.run.folder is None


CHECKS = """
from core.errors import UserError

def score(prompt, messages):
    return {"correct": 1.0}

def check(deadline_s):
    raise UserError(f"no tool answers within {deadline_s:g} s")
"""


def test_what_a_reward_needs_is_tried_on_the_machine_that_starts_it(recipe: Recipe, sums: Path, tmp_path: Path):
    needy = {"function": file_of(tmp_path / "needy.py", CHECKS)}
    first = load(recipe, {"reward": {**needy, "timeout_s": 7.0}})
    second = load(recipe, {"eval_reward": {**needy, "timeout_s": 9.0}, "data.eval": str(sums / "eval.parquet")})
    for cfg, seconds in ((first, 7), (second, 9)):
        said = tell(lambda cfg=cfg: check_reward_and_env(cfg, plan_rollouts(cfg)))
        assert said == f"no tool answers within {seconds} s"
        elsewhere = cfg.model_copy(update={"ray_address": "10.0.0.1:6379"})
        check_reward_and_env(elsewhere, plan_rollouts(elsewhere))
    plain = load(recipe)
    check_reward_and_env(plain, plan_rollouts(plain))
    against = with_rollout(plain, opponent="/old")
    said = tell(lambda: check_reward_and_env(against, plan_rollouts(against)))
    assert said.startswith("rollout.opponent needs a game of two sides or more, and SingleTurn.sides is 1")


# Opponents ---------------------------------------------------------------------------------------------------

GAME = """
from rollouts.envs.base import Env

class Game(Env):
    sides = SIDES

    async def step(self, reply):
        return None
"""


def test_an_opponent_needs_a_game_and_a_run_that_it_fits(recipe: Recipe, sums: Path, tmp_path: Path):
    game, alone = (resolve_env(file_of(tmp_path / f"sides_{n}.py", GAME.replace("SIDES", str(n)))) for n in (2, 1))
    held_out = load(recipe, {"data.eval": str(sums / "eval.parquet")})
    rounded = load(recipe, {"model.lora.merge_on_save": True, "model.quantization": "nf4"})
    raw = {"name": "e", "model": {"path": "m"}, "data": {"sets": [{"path": "x"}]}, "reward": {"function": "arithmetic"}}
    evaluation = EvalConfig.model_validate(raw)
    folder, policy = {"opponent": "/old"}, {"opponent": "policy", "opponent_every": 2}
    for cfg in (held_out, rounded, evaluation):
        check_game(with_rollout(cfg, **folder), game)
        check_game(cfg, alone)
    check_game(with_rollout(load(recipe), **policy), game)
    for cfg, keys, spec, sentence in (
        (
            held_out,
            folder,
            alone,
            "rollout.opponent needs a game of two sides or more, and Game.sides is 1: set rollout.env to a game, "
            "declare its sides in the class, or leave rollout.opponent out",
        ),
        (
            held_out,
            policy,
            game,
            "rollout.opponent is policy, and data.eval would be played against another opponent each time: leave "
            "data.eval out, and compare checkpoints by main_eval.py with the folder of a model as rollout.opponent",
        ),
        (
            rounded,
            policy,
            game,
            "rollout.opponent is policy, and its engine would not round weights as model.quantization=nf4 does: leave "
            "one of the two out",
        ),
        (
            evaluation,
            policy,
            game,
            "rollout.opponent is policy, and an evaluation trains none: name the folder of a model",
        ),
    ):
        changed = with_rollout(cfg, **keys)
        assert tell(lambda c=changed, s=spec: check_game(c, s)) == sentence


def test_an_opponent_is_loaded_from_its_folder_or_from_the_policy(recipe: Recipe, tiny_path: str):
    cfg = load(recipe)
    policy, built = plan_rollouts(cfg).engine, list[EngineConfig]()

    def build(config: EngineConfig) -> Any:
        built.append(config)
        return f"engine {len(built)}"

    def make(**keys: Any) -> Any:
        return build_opponent(with_rollout(cfg, **keys).rollout, cfg.model, policy, build)

    assert make() is None
    fixed, snapshot = make(opponent="/old"), make(opponent="policy", opponent_every=2)
    assert [(slot.model, slot.version) for slot in (fixed, snapshot)] == [("engine 1", None), ("engine 2", 0)]
    asyncio.run(snapshot.replace("/step_2", 2))
    assert (snapshot.model, snapshot.version) == ("engine 3", 2)
    assert built == [configure_opponent(path, cfg.model, policy) for path in ("/old", tiny_path, "/step_2")]


# Judges ------------------------------------------------------------------------------------------------------


class Mortal(Remote[Any]):
    """Judge that dies as often as it is told to when it is to sleep, and starts again at an address."""

    def __init__(self, deaths: int, address: str = "127.0.0.1") -> None:
        self.deaths, self.address = deaths, address

    def __len__(self) -> int:
        return 1

    async def call_one(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is JudgeWorker.listen:
            return "http://127.0.0.1:9", 9
        if self.deaths:
            self.deaths -= 1
            raise ProcessDied("judge 0: its process died", worker=("judge", 0))

    async def restart(self, rank: int) -> None:
        return

    async def find_free_address(self, rank: int) -> tuple[str, int]:
        return self.address, 0


def test_a_judge_starts_again_as_often_as_restarts_are_left():
    def put_to_sleep(workers: Mortal) -> tuple[Judges, list[str]]:
        judges = Judges(workers, (said := []).append, 2, [("127.0.0.1", 0)])
        asyncio.run(judges.sleep())
        return judges, said

    judges, said = put_to_sleep(Mortal(2))
    assert said == [
        "judge 0: its process died; restarting it (1 of rollout.restarts=2)",
        "judge 0 is back",
        "judge 0: its process died; restarting it (2 of rollout.restarts=2)",
        "judge 0 is back",
    ]
    assert (judges.n_restarts, judges.is_awake, judges.places) == (2, False, [("127.0.0.1", 9)])
    assert tell(lambda: put_to_sleep(Mortal(3)), ProcessDied) == (
        "judge 0: its process died; rollout.restarts=2 were used up before"
    )
    assert tell(lambda: put_to_sleep(Mortal(1, "10.0.0.2")), RunStopped) == (
        "judge 0 started again on another machine, 10.0.0.2, where no reward asks it: resume the run"
    )


class Lending:
    """Cluster whose new workers are these."""

    def __init__(self, workers: Mortal) -> None:
        self.workers = workers

    async def spawn(self, *given: Any, **keys: Any) -> Mortal:
        return self.workers


def test_a_new_judge_has_the_restarts_of_the_recipe(recipe: Recipe, tiny_path: str):
    cluster: Any = Lending(Mortal(1))
    cfg = with_rollout(load(recipe), restarts=1).model_copy(update={"judge": JudgeConfig(model=tiny_path)})
    judges = asyncio.run(start_judges(cluster, cfg, (said := []).append, "a key"))
    assert judges is not None and judges.urls == ("http://127.0.0.1:9",)
    asyncio.run(judges.sleep())
    assert said == ["judge 0: its process died; restarting it (1 of rollout.restarts=1)", "judge 0 is back"]


# Devices -----------------------------------------------------------------------------------------------------


def test_engines_of_a_machine_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 1, 4, 6, 2})

    def cores(rank: int, size: int) -> list[int]:
        return list_cores(RankInfo(rank=rank, size=size, address="", port=0))

    assert list_cores(None) == [1, 2, 4, 6, 8] == cores(0, 1) == cores(5, 6)
    assert [cores(rank, 2) for rank in range(2)] == [[1, 2], [4, 6, 8]]
    assert [cores(rank, 5) for rank in range(5)] == [[1], [2], [4], [6], [8]]


def test_deepspeed_looks_for_no_device_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    path = str(ROOT / "driver" / "start" / "trainers.py")
    for gpus, given, chosen in ((0, None, "cpu"), (2, None, None), (0, "cuda", "cuda")):
        monkeypatch.setattr(devices, "count_gpus", lambda n=gpus: n)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        if given is not None:
            monkeypatch.setenv("DS_ACCELERATOR", given)
        runpy.run_path(path)
        assert os.environ.get("DS_ACCELERATOR") == chosen
        os.environ.pop("DS_ACCELERATOR", None)


def test_devices_that_are_lacking_are_told_with_the_keys_that_help(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "check_gpus", lambda cfg: None)

    def check(gpus: int, cores: int | None, changes: dict[str, Any], **more: Any) -> str | None:
        monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        return devices.check_devices(load(recipe, changes).model_copy(update=more))

    on_vllm = {"backend": "ray", "rollout.engine": "vllm"}
    wide = on_vllm | {"trainer.ranks": 2}
    judge = JudgeConfig(model="m", num_engines=2)
    apart = judge.model_copy(update={"placement": "separate"})
    both = wide | {"placement": "colocate", "rollout.num_engines": 2}
    few = "lower trainer.ranks, rollout.num_engines or rollout.tensor_parallel_size"
    for found, said in (
        (
            check(0, 4, on_vllm | {"weight_sync.transport": "nccl"}),
            "weight_sync.transport is nccl, and trainers and engines get no GPUs: set it to auto, or device=cuda",
        ),
        (check(2, 4, on_vllm | {"weight_sync.transport": "nccl"}), None),
        (check(0, 4, {"device": "cuda"}), "device is cuda, and this machine has no GPU: set device=auto"),
        (check(1, 4, {"device": "cuda"}), None),
        (
            check(0, 4, on_vllm | {"trainer.ranks": 9}),
            f"9 trainer ranks and 1 engine ranks are more than this machine's 4 CPU cores: {few}",
        ),
        (check(0, 4, on_vllm | {"trainer.ranks": 4, "rollout.num_engines": 4}), None),
        (check(0, None, on_vllm), None),
        (
            check(4, 4, wide, judge=judge),
            "2 trainer ranks and 1 engine ranks and 2 judge ranks want 5 GPUs, and this machine has 4: set "
            "placement=colocate, or lower trainer.ranks or judge's engines (judge.num_engines)",
        ),
        (check(5, 4, wide, judge=judge), None),
        (check(2, 4, both, judge=judge), None),
        (
            check(2, 4, both, judge=apart),
            "2 trainer ranks and 2 engine ranks and 2 judge ranks share 4 GPUs, and this machine has 2: leave "
            "judge.placement out, or lower trainer.ranks, rollout.num_engines or judge's engines (judge.num_engines)",
        ),
        (check(0, 1, wide, ray_address="10.0.0.1:6379"), None),
    ):
        assert found == said


def test_a_judge_is_planned_from_its_own_keys(recipe: Recipe, tiny_path: str, monkeypatch: pytest.MonkeyPatch):
    changes = {"seed": 5, "rollout.gpu_memory_utilization": 0.5, "rollout.kv_cache_gib": 2.0}
    judge = JudgeConfig(
        **{"model": tiny_path, "engine": "hf", "temperature": 0.0, "allowed_tokens": ["y", "n"], "max_model_len": 100},
        **{"template_args": {"a": 1}, "num_engines": 3, "tensor_parallel_size": 2},
    )
    cfg = load(recipe, changes | {"rollout.enforce_eager": True}).model_copy(update={"judge": judge})
    shared = cfg.model_copy(update={"placement": "colocate"})
    planned = plan_judge(cfg, "a key")
    assert planned == JudgePlan(
        engine=EngineConfig(
            **{"model_path": tiny_path, "temperature": 0.0, "max_model_len": 100, "stop_token_ids": ()},
            **{"dtype": "float32", "images": "off", "seed": 5, "tensor_parallel_size": 2, "kv_cache_gib": 2.0},
            **{"gpu_memory_utilization": 0.5, "enforce_eager": True},
        ),
        **{"engine_spec": resolve_engine("hf"), "allowed_tokens": ["y", "n"], "template_args": {"a": 1}},
        served=Served(model=tiny_path, max_model_len=100, key="a key"),
    )
    assert plan_judge(shared, "a key") == replace(planned, engine=replace(planned.engine, sleep="offload"))

    def find(length: int | None) -> int:
        longer = judge.model_copy(update={"max_model_len": length})
        return find_judge_length(cfg.model_copy(update={"judge": longer}))

    assert (find(256), find(None)) == (256, 256)
    assert tell(lambda: find(257)) == f"judge.max_model_len=257, and {tiny_path} has 256 positions: lower it"
    policy = cfg.model_copy(update={"judge": JudgeConfig(model="policy")})
    assert plan_judge_roles(policy, Path("/run")) == []
    assert name_judge_model(policy) == name_judge_model(load(recipe)) == {}
    assert name_judge_model(cfg) == {"judge.model": tiny_path}
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    for n, given, resources in (
        (0, cfg, Resources(threads=3, ranks=2)),
        (8, cfg, Resources(gpus=2, ranks=2)),
        (8, shared, Resources(gpus=0, ranks=2)),
    ):
        monkeypatch.setattr(devices, "count_gpus", lambda n=n: n)
        for folder, needs in (("/run", False), (tiny_path, True)):
            assert plan_judge_roles(given, Path(folder)) == [
                Role(name="judge", n=3, resources=resources, needs_run_folder=needs)
            ]


def test_the_probe_is_the_beginning_of_the_first_prompt(recipe: Recipe, tiny_path: str):
    chat = ChatTokenizer(tiny_path, "chat")
    asked = [Prompt(id=text[0], messages=[{"role": "user", "content": text * 40}]) for text in ("1+", "2+")]
    cfg = load(recipe)
    for change, bound in (
        ({}, 0.002),
        ({"model": cfg.model.model_copy(update={"dtype": "bfloat16"})}, 0.1),
        ({"rollout": cfg.rollout.model_copy(update={"quantization": "int8"})}, 0.3),
        ({"weight_sync": cfg.weight_sync.model_copy(update={"probe_tolerance": 0.5})}, 0.5),
    ):
        probe = make_probe(cfg.model_copy(update=change), chat, asked)
        assert [*probe.token_ids] == chat.render(asked[0].messages)[:64] and len(probe.token_ids) == 64
        assert (probe.bound, [*probe.images], probe.explain()) == (bound, [], "")


def test_a_first_prompt_of_one_token_makes_no_probe(recipe: Recipe, tiny_path: str):
    plain = ChatTokenizer(tiny_path, "plain")
    for text, n in (("1", 1), ("1+", 2)):
        prompts = [Prompt(id=text, messages=[{"role": "user", "content": one}]) for one in (text, "1+1")]
        assert len(plain.render(prompts[0].messages)) == n
        if n == 1:
            said = tell(lambda asked=prompts: make_probe(load(recipe), plain, asked))
            assert said == "data.train: the first prompt has fewer than two tokens"
        else:
            assert [*make_probe(load(recipe), plain, prompts).token_ids] == plain.render(prompts[0].messages)
