"""What a recipe is checked for before anything starts: engine, model, rows, folders, metrics, sentence by sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algs.chord import CHORD
from algs.grpo import GRPO
from algs.teachers import Teacher
from algs.terms import Correction
from configs.schema import RLConfig, SLConfig
from core.errors import RunStopped
from core.types.images import EncodedImage
from core.types.samples import Prompt, RecordedEpisode
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.image_use import settle_images
from driver.checks.metric_names import list_metrics
from driver.checks.models import check_freeze, check_frozen, check_policy, check_room, check_trainer
from driver.checks.output_folder import MARKER, check_output_folders, check_run_dir, save_in_one_step, write_each
from driver.checks.terms import check_given
from driver.checks.weight_store import check_weight_store
from driver.load_recipe import Loaded, load_recipe
from driver.rl.setup import prepare
from modeling.saved_model import SavedModelWrong
from rewards.weights import plan_rewards
from unit_tests.helpers.models import random_model
from unit_tests.helpers.runs import file_of
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]


def load(recipe: Recipe, changes: dict[str, Any], kind: str = "rl") -> Loaded[Any]:
    return load_recipe(RLConfig if kind == "rl" else SLConfig, recipe(changes, kind=kind), [])


def refuse(recipe: Recipe, changes: dict[str, Any]) -> str:
    return tell(lambda: load(recipe, changes))


# The engine --------------------------------------------------------------------------------------------------

LACKING = """
from dataclasses import replace
from rollouts.engines.hf import HfEngine

class Mine(HfEngine):
    capabilities = replace(HfEngine.capabilities, NAME=False)
"""
ON_RAY = {"backend": "ray"}
SAY_SO = "as in rollouts/engines/hf.py, and say so in its capabilities"
LACKS: list[tuple[str, dict[str, Any], str]] = [
    # capability that the engine lacks, changes, sentence
    ("broadcast", ON_RAY, "ENGINE runs in the driver's process only: set backend to local, or take another engine"),
    (
        "stop_strings",
        {"rollout.stop": ["a"]},
        "rollout.stop is set, and ENGINE does not look for stop strings: end a completion where "
        f"EngineConfig.stop_strings says, {SAY_SO}",
    ),
    (
        "sleep",
        {"placement": "colocate"},
        "placement is colocate, and ENGINE does not sleep while the trainer has the device: add sleep and wake, "
        f"{SAY_SO}, or set placement to separate",
    ),
    *(
        (
            "chunks",
            ON_RAY | {"weight_sync.transport": transport},
            f"weight_sync.transport is {transport}, and ENGINE takes no weights in chunks: add begin_chunks and "
            f"load_chunk, {SAY_SO}, or set the transport to auto",
        )
        for transport in ("direct", "disk")
    ),
    (
        "deltas",
        {"weight_sync.delta": True},
        "weight_sync.delta is true, and ENGINE does not decode deltas: pass what it receives through a DeltaDecoder, "
        f"{SAY_SO}, or leave it out",
    ),
]


def test_an_engine_is_refused_what_it_lacks(recipe: Recipe, tmp_path: Path):
    for lacks, changes, sentence in LACKS:
        file = file_of(tmp_path / f"no_{lacks}.py", LACKING.replace("NAME", lacks))
        load(recipe, changes)
        told = sentence.replace("ENGINE", f"rollout.engine={file}")
        assert refuse(recipe, changes | {"rollout.engine": file}) == told


WEIGHTS_OF_ADAPTER = {"weight_sync.lora": "adapter", "model.lora": {}}
NOT_OF_HF: list[tuple[dict[str, Any], str]] = [
    (
        ON_RAY | {"rollout.tensor_parallel_size": 2},
        "rollout.engine=hf has no tensor parallelism: set rollout.tensor_parallel_size to 1",
    ),
    (
        {"rollout.top_k": 1},
        "rollout.top_k is 1, which leaves the policy no choice: every log-probability and every gradient would be 0; "
        "set it to 2 or more, or to 0 for all tokens",
    ),
    (
        ON_RAY | {"weight_sync.transport": "nccl"},
        "rollout.engine=hf takes no weights over NCCL: set weight_sync.transport to auto",
    ),
    (
        {"placement": "colocate", "weight_sync.delta": True},
        "weight_sync.delta is true, and placement is colocate, where both are on the same device: leave it out",
    ),
    (
        WEIGHTS_OF_ADAPTER | {"rollout.quantization": "int8"},
        "weight_sync.lora=adapter and rollout.quantization together have not been tried: set weight_sync.lora to "
        "merged",
    ),
    (
        WEIGHTS_OF_ADAPTER,
        "weight_sync.lora is adapter, and rollout.engine=hf does not sample with an adapter beside the weights: set "
        "rollout.engine to vllm, or weight_sync.lora to merged",
    ),
    (
        {"rollout.quantization": "int8", "alg.correction.level": "none"},
        "rollout.quantization is int8, so the engine samples from another policy than the trainer's, and "
        "alg.correction.level is none: set it to token",
    ),
    (
        {"alg.correction": {"max_drift": 0.1, "drift_from": "prox"}},
        "alg.correction.drift_from is prox, and with updates_per_step: 1 that is the policy itself, which never "
        "drifts: set it to rollout, or leave it out",
    ),
]


def test_what_the_engine_hf_cannot_do_is_refused(recipe: Recipe):
    for changes, sentence in NOT_OF_HF:
        assert refuse(recipe, changes) == sentence
    load(recipe, {"alg.correction": {"max_drift": 0.1, "drift_from": "prox"}, "updates_per_step": 2})
    load(recipe, {"rollout.quantization": "int8"})


BLIND = """
from core.errors import UserError
from rollouts.engines.hf import HfEngine

class Blind(HfEngine):
    @classmethod
    def check_images(cls, config, *, path):
        raise UserError(f"it cannot see {config.model_type} of {path}")
"""


def test_a_model_whose_images_the_engine_cannot_read_is_used_for_text(tiny_path: str, tmp_path: Path):
    seeing = tmp_path / "seeing"
    seeing.mkdir()
    (seeing / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    blind = file_of(tmp_path / "blind.py", BLIND)
    why = f"the model is used for text only, as with model.images=off: it cannot see gemma3 of {seeing}"
    for given, path, engine, settled in (
        ("auto", str(seeing), blind, ("off", why)),
        ("auto", str(seeing), "hf", ("auto", "")),
        ("off", str(seeing), blind, ("off", "")),
        ("auto", tiny_path, blind, ("auto", "")),
        ("auto", "models/made_later", blind, ("auto", "")),
    ):
        kind: Any = given
        assert settle_images(kind, path, engine=engine, trust_remote_code=False) == settled


# Models ------------------------------------------------------------------------------------------------------


def test_a_sample_has_a_position_for_each_token(recipe: Recipe, tiny_path: str):
    sizes = {"data.max_prompt_tokens": 200, "rollout.max_new_tokens": 56}
    check_room(load(recipe, sizes).cfg)
    long = load(recipe, sizes | {"rollout.max_new_tokens": 57}).cfg
    assert tell(lambda: check_room(long)) == (
        "one sample may reach 257 tokens (data.max_prompt_tokens + rollout.max_new_tokens), and "
        f"model.path={tiny_path} has 256 positions: lower one of the two"
    )
    chat = ChatTokenizer(tiny_path, "chat")

    def check(longest: int | None) -> None:
        check_frozen(tiny_path, chat, long.model, key="alg", use="be read", longest=longest)

    check(None)
    check(256)
    assert tell(lambda: check(257)) == (
        f"a sample may reach 257 tokens, and alg names the model {tiny_path}, which has 256 positions: lower "
        "data.max_tokens (supervised) or rollout.max_new_tokens, or take another model"
    )


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(recipe: Recipe, tiny_path: str):
    chat, model = ChatTokenizer(tiny_path, "chat"), load(recipe, {}).cfg.model
    check_policy(model, chat)
    rows = json.loads((Path(tiny_path) / "config.json").read_text())["vocab_size"]
    chat.hf.add_tokens([f"<{i}>" for i in range(rows + 1 - len(chat.hf))])
    assert tell(lambda: check_policy(model, chat)) == (
        f"model.path={tiny_path}: its tokenizer has ids up to {rows}, and the model has {rows} embeddings: resize them "
        "(model.resize_token_embeddings), or use the tokenizer that the model was trained with"
    )
    assert tell(lambda: check_frozen(tiny_path, chat, model, key="rollout.opponent", use="play on", longest=None)) == (
        f"rollout.opponent names the model {tiny_path}, whose vocabulary is not that of model.path={tiny_path}, so it "
        "cannot play on: take one with the same tokenizer"
    )


def test_what_cannot_be_compiled_is_refused_before_the_start(recipe: Recipe, tmp_path: Path):
    random_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48).config.save_pretrained(
        tmp_path / "experts"
    )
    mixture = {"model.path": str(tmp_path / "experts")}
    compiled = {"trainer.compile": True}

    def check(changes: dict[str, Any]) -> str:
        loaded = load(recipe, changes)
        return tell(lambda: check_trainer(loaded.cfg, loaded.alg))

    assert check(compiled | {"backend": "ray", "trainer.gradient_checkpointing": True}) == (
        "trainer.compile=true with backend: ray has not been compared with an uncompiled run for "
        "trainer.gradient_checkpointing: leave one of the two out"
    )
    assert check(compiled | mixture | {"rollout.router_replay": "replay"}) == (
        "trainer.compile=true, and rollout.router_replay reads choices inside of the blocks: leave one of them out"
    )


def test_names_of_frozen_and_scaled_parameters_are_those_of_the_model(recipe: Recipe):
    def check(changes: dict[str, Any], kind: str = "rl") -> None:
        loaded = load(recipe, changes, kind)
        check_freeze(loaded.cfg, loaded.alg)

    for key, wrong, right in (
        ("trainer.freeze", ["model.layers.7"], ["model.layers.1"]),
        ("trainer.lr_scales", {"model.layers.7": 2.0}, {"model.layers.1": 2.0}),
    ):
        check({key: right})
        said = f"{key}: 'model.layers.7' matches no parameter of model.path"
        assert tell(lambda wrong={key: wrong}: check(wrong)).startswith(said)
        # a reward model is checked when it is loaded
        check({key: wrong, "alg": {"name": "reward_model"}}, "sl")
    # and so are the names of an adapter
    check({"trainer.lr_scales": {"model.layers.7": 2.0}, "model.lora": {}})


# Rows and algorithm ------------------------------------------------------------------------------------------


def test_a_teacher_of_text_is_refused_the_images_of_its_own_sources(recipe: Recipe):
    cfg = load(recipe, {}).cfg
    rewards, image = plan_rewards(cfg.reward), {"type": "image", "image": EncodedImage(b"", width=1, height=1, hash="")}
    text, seen = ([{"role": "user", "content": "?"} | more] for more in ({}, {"parts": [image]}))

    def check(*sources: str, own_file: bool = False, has_prompt: bool = True) -> None:
        teacher = Teacher("m", column="c", sources=sources, prompt=(lambda s, g: None) if has_prompt else None)
        alg: Any = SimpleNamespace(terms=(), teachers={"t": teacher})
        said: Any = {"a": text, "b": seen}
        rows = [Prompt(id=one, messages=messages, source=one) for one, messages in said.items()]
        given: Any = SimpleNamespace(all=lambda: rows)
        check_given(cfg.model_copy(update={"alg": {"file": "mine.py"}}) if own_file else cfg, alg, given, rewards)

    said = (
        "data.train has images (as in b), and the teacher of SimpleNamespace reads text only: remove these rows, or "
        "use another algorithm"
    )
    assert [tell(lambda of=of: check(*of)) for of in ((), ("b",), ("a", "b"))] == [said] * 3
    check("a")
    check("b", own_file=True)
    check("b", has_prompt=False)


def test_demonstrations_need_a_term_and_a_reward_of_text(recipe: Recipe):
    cfg, played = (
        load(recipe, {}).cfg,
        load(recipe, {"reward.function": "environment", "rollout.env": "calculator"}).cfg,
    )
    asked = {"messages": [{"role": "user", "content": "?"}], "id": "a"}
    reply: Any = [{"role": "assistant", "content": "7"}]
    plain, shown = Prompt(**asked), Prompt(**asked, demonstration=reply)
    told = Prompt(**asked, recorded=(RecordedEpisode(messages=reply, completion="7"),))
    episode = RecordedEpisode(messages=reply, completion="7", token_ids=[1, 2], logp=[None, 0.0])
    mine = Prompt(**asked, recorded=(episode,))

    def check(alg: Any, row: Prompt, cfg: Any = cfg) -> None:
        given: Any = SimpleNamespace(all=lambda: [row])
        check_given(cfg, alg, given, plan_rewards(cfg.reward))

    exact = GRPO(correction=Correction(level="sequence"))
    for alg, row in ((GRPO(), plain), (CHORD(), shown), (CHORD(), told), (exact, mine)):
        check(alg, row)
    assert tell(lambda: check(CHORD(), plain)) == (
        "CHORD has a term on demonstrated tokens, and no row of data.train has a column demonstration: add it, or name "
        "the column that holds the replies in data.train columns ({demonstration: ...})"
    )
    for row in (shown, told):
        assert tell(lambda row=row: check(GRPO(), row)).startswith(
            "data.train has demonstrations, or episodes without logp (as in a), and GRPO trains on none: use an "
        )
    assert tell(lambda: check(CHORD(), shown, played)) == (
        "reward.function=environment scores episodes that were played, and the demonstrations and recorded episodes of "
        "data.train (as of a) are text: use a reward function of text, or remove them"
    )
    assert tell(lambda: check(GRPO(), mine)) == (
        "data.train has recorded episodes (as in a), and alg.correction.level=token is biased over a sequence: set it "
        "to sequence (and alg.correction.high to .inf for the exact weight)"
    )


def test_an_algorithm_that_cannot_train_here_is_refused_first(recipe: Recipe):
    for changes, sentence in (
        ({"alg": {"name": "sft"}}, "alg sft trains on given text: run it with main_sl.py"),
        (
            {"group_size": 1},
            "group_size is 1, and a group of one has no other sample to compare with: set it to 2 or more",
        ),
        (
            {"alg": {"name": "ppo", "critic_warmup": 2}, "steps": 2},
            "steps=2 are over before the policy is trained: raise steps, or lower critic_warmup",
        ),
    ):
        assert tell(lambda changes=changes: prepare(load(recipe, changes))) == sentence


def test_metrics_are_named_as_the_recipe_names_sources_and_functions(recipe: Recipe, sums: Path):
    def names(**changes: Any) -> set[str]:
        loaded = load(recipe, {key.replace("__", "."): value for key, value in changes.items()})
        return {metric.name for metric in list_metrics(loaded.cfg, loaded.alg)}

    train = str(sums / "train.parquet")
    mixture = [{"path": train, "name": "a"}, {"path": train, "name": "b"}]
    alone = names(reward__weights={"polite": 1.0})
    both = names(data__train=mixture, reward__function=None, reward__functions={"gsm8k": 1.0, "arithmetic": 1.0})
    for prefix in ("reward/", "eval/reward/"):
        assert {prefix + part for part in ("<part>", "mean", "std", "polite")} <= alone
        assert {prefix + part for part in ("<part>", "mean", "a", "b", "gsm8k.correct", "arithmetic.correct")} <= both
        assert not {prefix + "a", prefix + "arithmetic.correct"} & alone and prefix + "polite" not in both
    assert {f"data/{name}/rows" for name in "ab"} <= both and not any("<source>" in name for name in alone | both)
    held_out = {"data__eval": str(sums / "eval.parquet")}
    assert {name for name in names(**held_out, eval_samples=6) if "pass@" in name} == {
        f"eval/pass@{k}" for k in (1, 2, 4, 6)
    }
    assert not any("pass@" in name for name in names(**held_out))
    rows = load(recipe, {}, "sl")
    supervised = {metric.name for metric in list_metrics(rows.cfg, rows.alg)}
    assert {"eval/loss", "train/loss"} <= supervised and not any(name.startswith("reward/") for name in supervised)


# Folders -----------------------------------------------------------------------------------------------------


def test_the_folder_of_the_model_is_new_or_one_of_ours(recipe: Recipe, tiny_path: str, tmp_path: Path):
    loaded = load(recipe, {})
    made = {name: tmp_path / name for name in ("ours", "empty", "full", "a_file", "linked")}
    for name in ("ours", "empty", "full"):
        made[name].mkdir()
    (made["ours"] / MARKER).touch()
    for name in "ba":
        (made["full"] / name).touch()
    made["a_file"].touch()
    made["linked"].symlink_to(made["empty"])

    def check(folder: object) -> None:
        check_output_folders(loaded.cfg.model_copy(update={"save_to": str(folder)}), loaded.alg)

    for fine in (made["ours"], made["empty"], tmp_path / "x" / "new"):
        check(fine)
    check_output_folders(loaded.cfg, loaded.alg)
    for folder, said in (
        (tiny_path, f"is a model that this run reads ({tiny_path}): name another folder"),
        (tmp_path, f"holds run_dir={tmp_path / 'runs'}: name a folder of its own"),
        (made["linked"], f"is a link: name the folder that it leads to, {made['empty']}"),
        ("/proc", "is a mount point: name a folder in it, such as /proc/model"),
        (made["a_file"], "is a file: name a folder"),
        (made["full"], "holds a, and no run of FeynRL saved it: name another folder, or empty this one first"),
        (
            made["a_file"] / "x" / "y",
            f"lies below {made['a_file']}, which is a file: name another folder",
        ),
    ):
        assert tell(lambda folder=folder: check(folder)) == f"save_to={folder} {said}"


def test_a_run_folder_can_be_made_where_run_dir_says(tmp_path: Path):
    for fine in (tmp_path, tmp_path / "x" / "y"):
        check_run_dir(str(fine))
    assert [*tmp_path.iterdir()] == [], "what was tried is gone"
    (tmp_path / "a_file").touch()
    for wrong in (tmp_path / "a_file", tmp_path / "a_file" / "below"):
        assert tell(lambda wrong=wrong: check_run_dir(str(wrong))) == (
            f"run_dir={wrong}: no folder can be made in {tmp_path / 'a_file'} (Not a directory): name another folder, "
            "or make room"
        )


def test_a_store_of_weights_is_tried_and_left_as_it_was(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainers.weight_sync.store.WAITS_S", (0.0,))

    def check(folder: object) -> None:
        changes = {"backend": "ray", "weight_sync.transport": "disk", "weight_sync.folder": str(folder)}
        check_weight_store(load(recipe, changes).cfg)

    (store := tmp_path / "store").mkdir()
    check(store)
    assert [*store.iterdir()] == []
    (tmp_path / "a_file").touch()
    said = tell(lambda: check(tmp_path / "a_file" / "x"))
    assert said.startswith(f"weight_sync.folder={tmp_path / 'a_file' / 'x'}: ")
    assert said.endswith(": name a folder that may be written to, read and cleared")
    assert "is in the memory of one process, and trainers and engines are others" in tell(lambda: check("memory://x"))
    check_weight_store(load(recipe, {}, "sl").cfg)


def test_a_model_is_saved_with_its_marker_in_place_of_an_earlier_one(tmp_path: Path):
    home, facts = tmp_path / "model", {"run": "r", "steps": 3}

    def save(text: str, error: Exception | None = None) -> None:
        async def write(folder: Path) -> None:
            assert not folder.exists()
            folder.mkdir()
            (folder / text).touch()
            if error is not None:
                raise error

        asyncio.run(save_in_one_step(home, write, facts))

    (tmp_path / "model.partial").mkdir()  # of a run that was killed
    for text in ("first", "second"):
        save(text)
        assert sorted(path.name for path in home.iterdir()) == sorted([MARKER, text])
    assert (home / MARKER).read_text() == '{\n "run": "r",\n "steps": 3\n}\n'
    with pytest.raises(KeyError):
        save("third", KeyError("a bug"))
    assert (home / "second").is_file() and not (tmp_path / "model.partial").exists()
    with pytest.raises(SavedModelWrong):
        save("fourth", SavedModelWrong("it lacks a tensor"))
    assert (tmp_path / "model.partial" / "fourth").is_file(), "it may be all that is left of what was trained"


def test_all_folders_are_written_before_the_first_failure_is_raised():
    done: list[int] = []

    def write(n: int) -> Any:
        async def call() -> None:
            done.append(n)
            if n % 2:
                raise RunStopped(f"no room for {n}")

        return call

    with pytest.raises(RunStopped, match=r"^no room for 1$"):
        asyncio.run(write_each([write(n) for n in range(4)]))
    assert done == [0, 1, 2, 3]
    asyncio.run(write_each([write(n) for n in (4, 6)]))
