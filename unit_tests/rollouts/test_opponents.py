"""Frozen opponents in games: they play every side but the policy's, and nothing is trained on what they say."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from aiohttp import web
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

import main_eval
import main_rl
from configs.eval_schema import EvalModelConfig
from configs.rollout_schema import RewardConfig, RolloutConfig
from configs.trainer_schema import LoraConfig, ModelConfig
from core.cluster.workers import Local
from core.errors import RunStopped, UserError
from core.types.samples import Sample
from driver.checkpoint import Checkpoint, RunState
from driver.evaluation.suites import setup as eval_setup
from driver.records.episode_metrics import measure_counts
from driver.rl import setup as rl_setup
from driver.rl.opponent import Snapshots
from driver.start.opponent import build_opponent, configure_opponent
from modeling.merge import merge_adapter
from rewards.rewarder import Rewarder
from rewards.several import RewardPlan
from rollouts.engines.base import EngineConfig
from rollouts.engines.hf import HfEngine
from rollouts.opponents import Opponent, OpponentSlot, ServedOpponent
from rollouts.worker import RolloutWorker
from tools.benchmarks.judge_server import JudgeServer
from unit_tests.helpers.episodes import PROMPT, Duel, Scripted, Tool, Words, play_all
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import file_of, metrics_of, samples_of


@pytest.mark.parametrize("game", [0, 1, 2])
def test_the_policy_plays_one_side_and_only_that_side_is_a_sample(game):
    ours, theirs = Scripted([3], [5]), Scripted([4], [6])
    if game % 2:
        ours, theirs = theirs, ours
    [(sample, _)] = play_all(ours, env=Duel(), max_turns=9, opponent=Opponent(model=theirs, game=game))
    assert sample.player == game % 2 and sample.reward_parts == {"won": float(game % 2)}
    assert sample.token_ids.tolist() == [[1, 2, 7, 3, 4, 5], [1, 2, 3, 4, 5, 6]][game % 2]
    won = {"game/won": float(game % 2), "game/drawn": 0.0}
    assert sample.turns == ((3, 4), (5, 6)) and sample.counts == {"turns": 4.0} | won
    assert len(ours.asked) == len(theirs.asked) == 2


def test_a_game_that_ends_before_the_policys_turn_is_a_failed_sample():
    theirs = Scripted([6])
    [(sample, _)] = play_all(Scripted(), env=Duel(), max_turns=9, opponent=Opponent(model=theirs, game=1))
    assert sample.failure.startswith("the game ended before the policy's side (1) had a turn")
    assert sample.player == 1 and sample.n_sampled == 0 and sample.reward_parts == {}
    assert sample.counts == {"turns": 1.0}, "a failed game has no result"


class Odd(Duel):
    def __init__(self, result: object) -> None:
        super().__init__()
        self.result = result

    def result_of(self, player: int) -> object:
        return self.result


def test_wins_and_draws_are_fractions_of_the_games_with_a_result():
    def play(result: object) -> Sample:
        theirs = Opponent(model=Scripted([6]), game=0)
        return play_all(Scripted([3]), env=Odd(result), max_turns=9, opponent=theirs)[0][0]

    measured = measure_counts([play(result) for result in ("won", "lost", "drawn", "won", None)])
    assert measured == {"rollout/turns_mean": 2.0, "rollout/won": 0.5, "rollout/drawn": 0.25}
    assert play("victory").failure.startswith("ValueError: Env.result_of() must return won, drawn, lost or None")


def test_an_environment_of_one_side_has_no_opponent():
    ours, theirs = Scripted([6]), Scripted([6])
    [(sample, _)] = play_all(ours, env=Tool(), max_turns=9, opponent=Opponent(model=theirs, game=1))
    assert sample.failure.startswith("Env.sides is 1, and rollout.opponent needs a game of two or more")
    assert sample.n_sampled == 0 and not ours.asked and not theirs.asked


GAME = """
from rollouts.envs.base import Env

class Game(Env):
    said, sides = (), 2
    async def step(self, reply):
        self.said += (reply.message["content"],)
        self.player = 1
        return [{"role": "user", "content": reply.message["content"]}] if len(self.said) == 1 else None
    def scores_of(self, player):
        return {"longer": float(len(self.said[player]) > len(self.said[1 - player]))}
"""


def games_of(trained, tmp_path: Path, **changes: object) -> list[dict]:
    """Return the samples of a run's only step."""
    name = str(changes.get("name", f"run{len(changes)}"))
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "reward.function": "environment"}
    more = {"rollout.max_turns": 2, "rollout.max_new_tokens": 40, "data.max_prompt_tokens": 70, "steps": 1}
    more["rollout.stop_token_ids"] = [*range(5, 55)]  # replies of a random model end soon
    folder = trained({**game, **more, "reward.weights": {"longer": 1.0}, **changes, "name": name}, name=name)
    [file] = (folder / "samples").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_against_a_copy_of_its_model_has_one_side_of_self_play(trained, tiny_path, tmp_path):
    """The seeds are the same, so the games of the first step are, too."""
    shutil.copytree(tiny_path, tmp_path / "old")
    both = games_of(trained, tmp_path)
    ours = games_of(trained, tmp_path, **{"rollout.opponent": str(tmp_path / "old")})
    assert len(both) == 32 and len(ours) == 16

    def completions(samples: list[dict], row: str, player: int) -> list[tuple[str, float]]:
        of = [s for s in samples if s["id"] == row and s.get("player", 0) == player]
        return sorted((s["completion"], s["reward"]) for s in of)

    sides = {s["id"]: s.get("player", 0) for s in ours}
    assert sorted(sides.values()) == [0, 0, 1, 1], "another side from group to group"
    for row, side in sides.items():
        assert len(completions(ours, row, side)) == 4 and not completions(ours, row, 1 - side)
        assert completions(ours, row, side) == completions(both, row, side)


def test_an_opponent_without_a_game_or_of_other_tokens_is_refused(refused, qwen, tiny_path, tmp_path):
    old = tmp_path / "old"
    refused({"rollout.opponent": str(old)}, "opponent is the other side of a game: set rollout.env to a game")
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "rollout.max_turns": 2, "rollout.opponent": str(old)}
    game |= {"reward.function": "environment", "reward.weights": {"longer": 1.0}}
    refused(game, "rollout.opponent")
    one_sided = file_of(tmp_path / "one.py", GAME.replace("said, sides = (), 2", "said = ()"))
    refused(game | {"rollout.env": one_sided}, "needs a game of two sides or more, and Game.sides is 1")
    shutil.copytree(tiny_path, old)
    qwen.hf.save_pretrained(old)
    refused(game | {"placement": "colocate"}, "placement is colocate, and rollout.opponent would keep the device")
    refused(game, "rollout.opponent names the model", "so it cannot play with the same tokens")


def test_an_opponents_folder_is_compared_on_every_machine(recipe, tiny_path, tmp_path, sums, monkeypatch):
    async def show(context, roles, models):
        raise RunStopped(f"compared: {models}")

    monkeypatch.setattr(rl_setup, "claim_machines", show)
    monkeypatch.setattr(eval_setup, "claim_machines", show)
    old = str(shutil.copytree(tiny_path, tmp_path / "old"))
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "rollout.max_turns": 2, "rollout.opponent": old}
    game |= {"reward.function": "environment", "reward.weights": {"longer": 1.0}}
    sets = f"data.sets=[{{path: {sums}/eval.parquet}}]"
    of_eval = [f"model.path={tiny_path}", sets, "backend=local", "rollout.engine=hf", f"run_dir={tmp_path}/runs"]
    of_eval += [f"{key}={json.dumps(value)}" for key, value in game.items()]
    of_eval += ["model.dtype=float32", "data.max_prompt_tokens=32", "rollout.max_new_tokens=8"]
    (tmp_path / "eval.yaml").write_text("name: eval\n")
    for program, path, keys in ((main_rl, recipe(game), []), (main_eval, str(tmp_path / "eval.yaml"), of_eval)):
        code, err = run_here(program, "--config", path, *keys)
        assert code == 1 and f"'rollout.opponent': '{old}'" in err, err


def test_an_opponent_samples_as_the_policy_from_whole_weights(tmp_path):
    kept = {"temperature": 0.7, "max_model_len": 64, "stop_token_ids": (), "dtype": "float32", "images": "off"}
    kept |= {"trust_remote_code": True, "seed": 3, "cores": [1], "kv_cache_gib": 2.0, "enforce_eager": True}
    own = {"starts_empty": True, "lora": LoraConfig(), "quantization": "int8", "options": {"a": 1}, "routes": True}
    own |= {"tensor_parallel_size": 2, "over_nccl": True, "over_ipc": True}
    policy, model = EngineConfig(model_path="merged", **kept, **own), ModelConfig(path="base")
    assert configure_opponent("other", model, policy) == EngineConfig(model_path="other", **kept)
    file_of(tmp_path / "adapter_config.json", "{}")
    adapted = configure_opponent(str(tmp_path), model, policy)
    assert adapted == EngineConfig(model_path="base", adapter=str(tmp_path), **kept)


def make_adapter(folder: Path, base: str, *, names: str | None) -> str:
    """Save an adapter with an effect. names: base that its config names."""
    model = AutoModelForCausalLM.from_pretrained(base)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": names}))
    return str(folder)


def test_an_adapter_plays_as_its_merged_model(tiny_path, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", tiny_path, names=tiny_path)
    policy = EngineConfig(
        model_path="no folder", temperature=1.0, max_model_len=64, stop_token_ids=(), dtype="float32", starts_empty=True
    )
    engine = HfEngine(configure_opponent(adapter, ModelConfig(path=tiny_path), policy))
    ids = [5, 9, 12, 7]
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_path), adapter).eval()
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert asyncio.run(engine.probe(ids)) == pytest.approx([logp[i, t].item() for i, t in enumerate(ids[1:])], abs=1e-5)


@pytest.mark.parametrize(
    "names, said", [(None, "no base_model_name_or_path"), ("other", "is an adapter of other, and model.path is")]
)
def test_an_adapter_of_an_unknown_or_another_model_is_refused(refused, tiny_path, tmp_path, names, said):
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "rollout.max_turns": 2}
    game |= {"reward.function": "environment", "reward.weights": {"longer": 1.0}}
    adapter = make_adapter(tmp_path / "adapter", tiny_path, names=names)
    refused(game | {"rollout.opponent": adapter}, f"rollout.opponent={adapter}", said)


@pytest.mark.slow
def test_a_run_against_an_adapter_plays_the_merged_model(trained, tiny_path, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", tiny_path, names=tiny_path)
    model = EvalModelConfig(path=tiny_path, dtype="float32")
    merge_adapter(model, adapter, tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(tiny_path) / name).exists():
            shutil.copy(Path(tiny_path) / name, tmp_path / "merged")
    ours, theirs = ({"rollout.opponent": str(tmp_path / name), "name": name} for name in ("adapter", "merged"))
    assert games_of(trained, tmp_path, **ours) == games_of(trained, tmp_path, **theirs)


class GameServer(JudgeServer):
    """Server of a model that says a number, and refuses some requests first."""

    choice: str | dict | None = None
    body: dict | None = None

    async def complete(self, request: web.Request) -> web.Response:
        return await super().complete(request) if self.body is None else web.json_response(self.body)

    def answer(self, body: dict) -> str | dict:
        return self.choice or str(len(body["messages"]))

    def make_app(self) -> web.Application:
        app = super().make_app()
        app.router.add_get("/v1/models", self.list_models)
        return app

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.key.split() or ["m"]]})


def test_a_server_plays_with_messages_and_is_asked_again(tmp_path):
    server = GameServer(statuses=deque([503, 0]))
    with server.running() as address:
        theirs = ServedOpponent(address, temperature=0.5, timeout_s=10, engines=1)
        ours = Scripted([3], [6])
        [(sample, _)] = play_all(ours, env=Duel(), max_turns=9, opponent=Opponent(model=theirs, game=0))
    # the policy sees prompt and opening, says 3, is told 3 (the server's messages: prompt, 3 ...), and ends the game
    assert sample.token_ids.tolist() == [1, 2, 7, 3, 2, 6] and sample.turns == ((3, 4), (5, 6))
    assert sample.player == 0 and sample.failure == "" and sample.counts["turns"] == 3.0
    [body] = server.bodies
    assert body["messages"] == [{"role": "user", "content": "1 2"}, {"role": "user", "content": "3"}]
    assert body | {"messages": []} == {
        **{"model": "m", "messages": [], "temperature": 0.5, "max_tokens": 10, "seed": 101},
    }


def test_a_served_opponent_has_the_limits_and_share_of_its_engines():
    rollout = RolloutConfig(max_new_tokens=8)
    made: Any = None
    with GameServer().running() as address:
        keys = {"opponent": f"{address}/", "temperature": 0.25, "timeout_s": 7.0, "num_engines": 5}
        slot = build_opponent(rollout.model_copy(update=keys), made, made, made)
    served = slot.model
    assert (served.url, served.model, served.temperature, slot.version) == (address, "m", 0.25, None)
    assert (served._client.settings.timeout_s, served._client._gate._value) == (7.0, 32 // 5)


def test_a_server_that_fails_to_reply_fails_the_sample_or_ends_the_game():
    server = GameServer(statuses=deque([400]))
    with server.running() as address:

        def play() -> Sample:
            theirs = Opponent(model=ServedOpponent(address, temperature=0.5, timeout_s=10, engines=1), game=0)
            [(sample, _)] = play_all(Scripted([3]), env=Duel(), max_turns=9, opponent=theirs)
            return sample

        assert play().failure.startswith("rollout.opponent refused the request with status 400")
        server.choice = {"message": {"role": "assistant", "content": "3"}, "finish_reason": "length"}
        sample = play()
        assert not sample.failure and sample.counts["turns"] == 2.0
        of_choice = [{"choices": [choice]} for choice in ({}, {"message": {}}, {"message": {"content": "3"}}, "3")]
        for server.body in ({}, {"choices": []}, {"choices": None}, *of_choice):
            assert play().failure.startswith(f"rollout.opponent returned no chat completion: {server.body}")
        for content, end in ((None, "stop"), ("3", "tool_calls")):
            server.body = {"choices": [{"message": {"content": content}, "finish_reason": end}]}
            said = f"rollout.opponent ended a reply with {end!r} and the content {content!r}"
            assert play().failure.startswith(said)


def test_a_server_gets_text_alone():
    tool: Any = {"type": "function"}
    with GameServer().running() as address:
        theirs = ServedOpponent(address, temperature=0.5, timeout_s=10, engines=1)
        with pytest.raises(UserError, match="gets text alone, and the game has tools"):
            asyncio.run(theirs.reply(PROMPT.messages, [tool], max_new_tokens=1, seed=0))


def test_a_server_of_several_models_or_none_is_refused():
    with GameServer(key="a b").running() as address, pytest.raises(UserError, match="must name one model, found a, b"):
        ServedOpponent(address, temperature=0.5, timeout_s=10, engines=1)
    with pytest.raises(UserError, match="does not answer"):
        ServedOpponent(address, temperature=0.5, timeout_s=10, engines=1)


@pytest.mark.parametrize("address", ["http://host:80a/v1", "http://host:99999/v1", "http://a b/v1", "http://"])
def test_an_address_that_is_none_is_refused(refused, tmp_path, address):
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "rollout.max_turns": 2}
    refused(game | {"rollout.opponent": address}, "rollout", "opponent must be an address like http://host:8000/v1")


def test_a_password_in_an_address_is_refused_and_not_quoted():
    with pytest.raises(ValidationError, match="opponent contains a password or key"):
        RolloutConfig(env="game", opponent="http://me:secret@host/v1")
    assert RolloutConfig(env="game", opponent="http://[::1]:8000/v1").is_opponent_served


def test_a_group_plays_one_opponent_although_a_newer_arrives(tmp_path):
    slot = OpponentSlot(Scripted([6], [6]), version=0)

    class Renewed(Scripted):
        async def generate(self, token_ids, *, max_new_tokens, seed):
            slot.version = 5
            return await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)

    worker = RolloutWorker(
        Renewed([3], [3]),
        Words(),
        lambda prompt: Duel(),
        Rewarder(RewardPlan(functions=()), 1, 30.0),
        reward=RewardConfig(function="environment", weights={"won": 1.0}),
        rollout=RolloutConfig(max_new_tokens=20, max_turns=9, max_concurrency=1),
        seed=11,
        opponent=slot,
    )
    assert asyncio.run(worker.play_group(4, PROMPT, 2))
    versions = [played.sample.counts["game/opponent_version"] for [played] in worker.played[4][1]]
    assert versions == [0.0, 0.0] and slot.enter(5).version == 5


def test_a_snapshot_is_loaded_beside_the_event_loop():
    old, new, threads = Scripted(), Scripted(), []

    def load(folder: str) -> Scripted:
        threads.append(threading.get_ident())
        assert slot.enter(0).model is old
        return new

    slot = OpponentSlot(old, version=0, load=load)
    for _ in range(2):
        asyncio.run(slot.replace("folder", 3))
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert slot.enter(1) == Opponent(model=new, game=1, version=3)


def test_a_resumed_run_takes_the_snapshots_of_the_run_that_it_continues(tmp_path):
    """Weights are sent every 3 steps, and the checkpoint is of step 5."""

    async def save(folder: Path, *, steps: int) -> None:
        folder.mkdir(parents=True)

    slot = OpponentSlot(Scripted())
    whole, again = (
        Snapshots(every=2, run_folder=tmp_path / name, slots=Local(slot), save=save) for name in ("whole", "again")
    )
    for version in (0, 3):
        asyncio.run(whole.renew(version))
    state = RunState(steps_done=5, metrics={}, position={}, recipe={}, opponent_version=whole.version)
    again.restore(Checkpoint(folder=tmp_path / "whole/checkpoints/step_00005", state=state))
    for version, played in ((5, 3), (6, 6)):
        asyncio.run(again.renew(version))
        assert again.version == played
        assert [path.name for path in (tmp_path / "again/opponents").iterdir()] == [f"step_{played:05d}"]
    shutil.rmtree(tmp_path / "whole/opponents")
    with pytest.raises(UserError, match=r"^resume: .*whole/opponents/step_00003 is missing, the opponent that played"):
        again.restore(Checkpoint(folder=tmp_path / "whole/checkpoints/step_00005", state=state))


@pytest.mark.verify
def test_snapshots_of_the_policy_play_also_in_a_resumed_run(trained, recipe, tmp_path):
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "reward.function": "environment"}
    game |= {"reward.weights": {"longer": 1.0}, "rollout.max_turns": 2, "rollout.max_new_tokens": 40, "steps": 4}
    game |= {"data.max_prompt_tokens": 70, "rollout.stop_token_ids": [*range(5, 55)], "trainer.lr": 1e-2}
    game |= {"rollout.opponent": "policy", "rollout.opponent_every": 2}
    whole = trained(game | {"name": "whole", "checkpoint.every": 3}, name="whole")
    assert [m["rollout/opponent_version"] for m in metrics_of(whole)] == [0, 0, 2, 2]
    short = trained(game | {"name": "short", "steps": 2}, name="short")
    snapshot = whole / "opponents/step_00002/model.safetensors"
    assert snapshot.read_bytes() == (short / "model/model.safetensors").read_bytes()
    assert samples_of(whole, 2) != samples_of(whole, 1)
    again = trained(game | {"name": "again", "resume": str(whole / "checkpoints/step_00003")}, name="again")
    assert metrics_of(again)[0]["rollout/opponent_version"] == 2
    assert samples_of(again, 3) == samples_of(whole, 3)
    shutil.rmtree(whole / "opponents")
    code, err = run_here(main_rl, "--config", recipe(game | {"resume": str(whole / "checkpoints/step_00003")}))
    assert code == 2 and "the opponent that played when the checkpoint was made: restore it" in err


@pytest.mark.verify
@pytest.mark.timeout(400)
def test_snapshots_play_beside_vllm_on_ray(trained, tmp_path):
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "reward.function": "environment", "steps": 4}
    game |= {"reward.weights": {"longer": 1.0}, "rollout.max_turns": 2, "rollout.max_new_tokens": 40}
    game |= {"data.max_prompt_tokens": 70, "rollout.stop_token_ids": [*range(5, 55)], "trainer.lr": 1e-2}
    game |= {"rollout.opponent": "policy", "rollout.opponent_every": 2}
    folder = trained(game | {"backend": "ray", "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.1}, name="test")
    assert [m["rollout/opponent_version"] for m in metrics_of(folder)] == [0, 0, 2, 2]
    assert [path.name for path in (folder / "opponents").iterdir()] == ["step_00004"], "no checkpoint needs another"


def test_the_policy_as_opponent_needs_the_steps_between_its_snapshots(refused, tmp_path):
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "rollout.max_turns": 2}
    refused(game | {"rollout.opponent": "policy"}, "opponent: policy and opponent_every belong together")
    refused(game | {"rollout.opponent_every": 2}, "opponent: policy and opponent_every belong together")


def test_an_evaluation_against_changing_snapshots_is_refused(refused, sums, tmp_path):
    game = {"rollout.env": file_of(tmp_path / "game.py", GAME), "rollout.max_turns": 2}
    game |= {"reward.function": "environment", "reward.weights": {"longer": 1.0}}
    game |= {"rollout.opponent": "policy", "rollout.opponent_every": 2, "data.eval": f"{sums}/eval.parquet"}
    refused(game, "rollout.opponent is policy, and data.eval would be played against another opponent each time")
