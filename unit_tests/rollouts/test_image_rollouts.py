"""Rollouts with images: what the engine says it sampled with is what plain transformers says of the same images."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import AutoConfig, PreTrainedModel

import main_eval
from algs.sft import SFT
from configs.eval_schema import EvalConfig
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig, TrainerConfig
from core.errors import RunStopped, UserError
from core.timing.clock import ActivityTimer
from core.timing.phases import ENGINE_ACTIVITIES
from core.types.allowed_tokens import AllowedTokens
from core.types.images import PlacedImage, as_argument, list_written, write_data_uri
from core.types.messages import Message
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import pack
from driver.checks.engine import check_images
from driver.checks.image_use import settle_eval_images
from driver.evaluation.suites.setup import load_eval_recipe, prepare_eval
from driver.load_recipe import load_recipe
from driver.start.weight_sync import make_probe
from modeling.images.processor import ImageProcessor
from rollouts.agents.dialects.chat import read_ask
from rollouts.agents.session import Request
from rollouts.agents.task import Task, write_content
from rollouts.agents.trace import Branch
from rollouts.agents.wire import BadRequest, ChatRequest
from rollouts.engines.base import Completion
from rollouts.engines.hf import HfEngine
from rollouts.engines.vllm_support import architectures
from rollouts.engines.vllm_support.images import check_prompt, collapse_images, make_prompt
from rollouts.envs.base import Env
from rollouts.envs.check_env import check_answers
from rollouts.episode import run_episode
from rollouts.transcript import find_places
from rollouts.turns import EpisodeRules
from trainers.local import LocalTrainer
from trainers.weight_sync.base import Probe
from trainers.weight_sync.fingerprint import verify_sync
from trainers.weight_sync.publisher import LocalWeightSync
from unit_tests.helpers import seeing
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.image_models import say
from unit_tests.helpers.plain_vision import (
    PARTS,
    as_sample,
    draw,
    gap_of_sample,
    load_plain,
    make_seeing,
    plain_logp,
    write_ids,
)
from unit_tests.helpers.runs import file_of, metrics_of
from unit_tests.helpers.scripted_policy import Policy, check_exact, make_session

pytestmark = pytest.mark.one_core

EVAL = {
    "name": "eval",
    "model": {"path": "models/none", "dtype": "float32"},
    "data": {"sets": [{"path": "none"}], "max_prompt_tokens": 64},
    "reward": {"function": "arithmetic"},
    "rollout": {"max_new_tokens": 8},
}
TEMPERATURE = 0.7
BOUND = 1e-4
LOOKS = [say("user", "what is ", draw(1), "?")]
COMPARES = [say("user", draw(2), "or", draw(3, 40, 80), "or", draw(2))]
READS = [{"role": "user", "content": "how many?"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def tokenizer(path) -> ChatTokenizer:
    return ChatTokenizer(path, "chat")


@pytest.fixture(scope="module")
def model(path) -> PreTrainedModel:
    return load_plain(path)


def banned_of(tokenizer: ChatTokenizer) -> list[int]:
    assert tokenizer.images is not None
    return sorted(tokenizer.images.placeholder_ids)


def engine_of(path: str, tokenizer: ChatTokenizer, **settings) -> HfEngine:
    only = {"stop_token_ids": tokenizer.stop_token_ids, "temperature": TEMPERATURE}
    allowed = AllowedTokens(banned=tuple(banned_of(tokenizer)))
    return HfEngine(engine_config(path, allowed_tokens=allowed, **only, **settings))


def read(tokenizer: ChatTokenizer, messages) -> tuple[list[int], tuple[PlacedImage, ...]]:
    ids = tokenizer.render(messages)
    return ids, find_places(tokenizer, ids, messages)


def named(model: PreTrainedModel):
    return [[(name, p.detach()) for name, p in model.named_parameters()]]


def with_other_vision(path: str) -> PreTrainedModel:
    """The same model but for its vision tower."""
    model = load_plain(path)
    with torch.no_grad():
        for parameter in model.model.vision_model.parameters():
            parameter.mul_(1.5)
    return model


def test_one_batch_with_and_without_images_scores_as_plain_transformers(path, tokenizer, model):
    prompts = [read(tokenizer, messages) for messages in (LOOKS, READS, COMPARES)]
    engine = engine_of(path, tokenizer)

    async def go() -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.generate(ids, max_new_tokens=12, seed=i, **as_argument(places))
                for i, (ids, places) in enumerate(prompts)
            )
        )

    for (ids, places), done in zip(prompts, asyncio.run(go()), strict=True):
        sample = as_sample(ids, places, done)
        assert gap_of_sample(model, path, sample, TEMPERATURE, banned_of(tokenizer)) < BOUND
        if places:  # the control: it looks at the images
            others = tuple(replace(place, image=draw(9)) for place in places)
            blind = replace(sample, images=others)
            assert gap_of_sample(model, path, blind, TEMPERATURE, banned_of(tokenizer)) > 100 * BOUND


def test_each_group_computes_its_own_image_once_even_with_the_same_tokens(path, tokenizer, model):
    (ids, one), (_, other) = (read(tokenizer, [say("user", "what is ", draw(n), "?")]) for n in (1, 2))
    engine = engine_of(path, tokenizer)
    seen: list[int] = []
    engine.model.model.vision_model.register_forward_hook(lambda _, args, out: seen.append(len(out[0])))
    asked = [one, other, one, one, other]

    async def go() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(ids, max_new_tokens=6, seed=i, images=places) for i, places in enumerate(asked))
        )

    for places, done in zip(asked, asyncio.run(go()), strict=True):
        sample = as_sample(ids, places, done)
        assert gap_of_sample(model, path, sample, TEMPERATURE, banned_of(tokenizer)) < BOUND
    assert seen == [2]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm"])
def test_other_families_too_with_their_positions_and_tiles(family, tmp_path):
    path = seeing.save_model(tmp_path, family)
    model, processor = load_plain(path), ImageProcessor(path)
    banned = sorted(processor.placeholder_ids)

    prompts = [write_ids(processor, *parts) for parts in PARTS]
    only = {"stop_token_ids": [seeing.FIRST, seeing.FIRST + 1], "temperature": TEMPERATURE}
    engine = HfEngine(engine_config(path, allowed_tokens=AllowedTokens(banned=tuple(banned)), **only))

    async def go() -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.generate(ids, max_new_tokens=12, seed=i, **as_argument(places))
                for i, (ids, places) in enumerate(prompts)
            )
        )

    for (ids, places), done in zip(prompts, asyncio.run(go()), strict=True):
        assert gap_of_sample(model, path, as_sample(ids, places, done), TEMPERATURE, banned) < BOUND
    ids, places = prompts[0]
    want = plain_logp(model, path, ids, places)[[i - 1 for i in list_written(len(ids), places)]].tolist()
    assert asyncio.run(engine.probe(ids, images=places)) == pytest.approx(want, abs=BOUND)


def test_new_vision_weights_are_used_at_once_in_running_requests(path, tokenizer, model):
    ids, places = read(tokenizer, COMPARES)
    engine, new = engine_of(path, tokenizer), with_other_vision(path)
    engine.stop = set()

    async def go() -> Completion:
        await engine.load_weights(0, named(model))
        asking = asyncio.create_task(engine.generate(ids, max_new_tokens=16, seed=4, images=places))
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.load_weights(1, named(new))
        return await asking

    done = asyncio.run(go())
    assert {*done.versions} == {0, 1} and done.versions == sorted(done.versions)
    banned, n = banned_of(tokenizer), len(ids)
    for version, one in ((0, model), (1, new)):
        mine = [i for i, v in enumerate(done.versions) if v == version]
        of_one, of_other = (
            plain_logp(m, path, ids + done.token_ids, places, TEMPERATURE, banned)[n - 1 :][mine]
            for m in (one, model if version else new)
        )
        said = torch.tensor(done.logp)[mine]
        assert float((of_one - said).abs().max()) < BOUND < 100 * BOUND < float((of_other - said).abs().max())


def test_the_probe_sees_a_vision_tower_with_old_weights(path, tokenizer, model):
    """An engine that keeps what it computed of an image gets all weights, and is caught."""
    ids, places = read(tokenizer, LOOKS)
    new = with_other_vision(path)
    written = list_written(len(ids), places)
    want = {m: plain_logp(m, path, ids, places)[[i - 1 for i in written]].tolist() for m in (model, new)}

    def publish(engine: HfEngine) -> None:
        asyncio.run(engine.load_weights(1, named(new)))
        probed = asyncio.run(engine.probe(ids, images=places))
        verify_sync({}, [[{}]], expected_logp=want[new], probe_logp=[probed], bound=BOUND)

    fresh, stale = engine_of(path, tokenizer), engine_of(path, tokenizer)
    assert asyncio.run(fresh.probe(ids, images=places)) == pytest.approx(want[model], abs=BOUND)
    publish(fresh)
    seeing = stale.model.model
    features = seeing.get_image_features(**stale.processor.collate([p.image for p in places]))
    seeing.get_image_features = lambda *_, **__: features
    with pytest.raises(RunStopped, match="log-probabilities of the probe"):
        publish(stale)


def test_trainer_and_engine_agree_on_images_before_and_after_a_vision_sync(path, tokenizer):
    ids, places = read(tokenizer, COMPARES)
    banned = AllowedTokens(banned=tuple(banned_of(tokenizer)))
    trainer = LocalTrainer(
        ModelConfig(path=path, dtype="float32", attention="sdpa"),
        TrainerConfig(lr=0.01),
        SFT(),
        temperature=TEMPERATURE,
        total_updates=1,
        allowed_tokens=banned,
    )
    engine = engine_of(path, tokenizer)
    timers = trainer.timer, ActivityTimer(*ENGINE_ACTIVITIES)
    sync = LocalWeightSync(trainer, engine, timers, Probe(token_ids=ids, bound=BOUND, images=places), 10_000, "whole")
    probed = []
    for version in range(2):
        told = asyncio.run(sync.publish_weights(version))
        assert told["sync/probe_gap"] < 1e-5
        done = asyncio.run(engine.generate(ids, max_new_tokens=12, seed=version, images=places))
        sample = as_sample(ids, places, done)
        [scored] = trainer.compute_columns([pack([sample], [1.0])], frozenset({"prox_logp"}))
        assert scored["prox_logp"].tolist() == pytest.approx(done.logp, abs=1e-5)
        probed.append(asyncio.run(engine.probe(ids, images=places)))
        with torch.no_grad():
            for parameter in trainer.model.model.vision_model.parameters():
                parameter.mul_(1.5)
    assert probed[0] != pytest.approx(probed[1], abs=100 * BOUND)


class Shows(Env):
    """Shows another image after the first reply."""

    async def step(self, reply):
        self.turns = getattr(self, "turns", 0) + 1
        return [say("user", "now ", draw(5, 80, 40), "?")] if self.turns == 1 else None


def play(engine, tokenizer, env, *, max_new_tokens=60, prompt=LOOKS):
    rules = EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=max_new_tokens, max_turns=3, timeout_s=60.0)
    [played] = asyncio.run(run_episode(engine, env, Prompt(id="p", messages=prompt), tokenizer, rules))
    return played


def test_images_in_two_turns_are_placed_and_seen(path, tokenizer, model):
    engine = engine_of(path, tokenizer)
    for seed in range(40):  # until the first reply ends by itself
        engine.stop = {seed % 100, *tokenizer.stop_token_ids}
        played = play(engine, tokenizer, Shows)
        if len(played.sample.spans) == 2:
            break
    sample = played.sample
    assert sample.failure == "" and len(sample.spans) == 2
    assert [place.image for place in sample.images] == [draw(1), draw(5, 80, 40)]
    first, second = sample.images
    assert first.end <= sample.spans[0][0] and sample.spans[0][1] <= second.begin and second.end <= sample.spans[1][0]
    for place in sample.images:
        assert tuple(sample.token_ids[place.begin : place.end]) == tokenizer.images.expand(place.image).ids
    assert gap_of_sample(model, path, sample, TEMPERATURE, banned_of(tokenizer)) < BOUND
    assert "parts" in played.messages[1]


def test_a_image_of_the_environment_uses_up_the_budget(path, tokenizer):
    """With all its tokens: the second turn has fewer left than the expanded image takes."""
    engine = engine_of(path, tokenizer)
    engine.stop = set(range(200))
    played = play(engine, tokenizer, Shows, max_new_tokens=8)
    assert played.sample.stop == "length" and len(played.sample.spans) == 1 and len(played.sample.images) == 1


class Echoes(Env):
    async def step(self, reply):
        return [{"role": "user", "content": "you said <image>"}]


def test_text_that_stands_for_a_image_fails_the_episode_and_not_the_run(path, tokenizer):
    engine = engine_of(path, tokenizer)
    engine.stop = set(range(200))
    assert "'<image>'" in play(engine, tokenizer, Echoes).sample.failure


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ({"type": "text", "text": "a"}, "parts are a list"),
        ([{"type": "text", "text": "a"}, {"type": "image", "image": b"PNG"}], "returned the part"),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}], "returned the part"),
        ([{"type": "text"}], "returned the part"),
        (["a"], "returned the part"),
        ([{"type": "text", "text": "b"}, {"type": "image", "image": draw(1)}], "not the text of its parts"),
    ],
)
def test_malformed_parts_of_an_environment_are_refused(parts, wrong):
    with pytest.raises(TypeError, match=wrong):
        check_answers([{"role": "user", "content": "a", "parts": parts}], "Env.step()")
    assert check_answers([say("user", "a", draw(1))], "Env.step()") == [say("user", "a", draw(1))]


def test_the_probe_holds_the_first_image_whole(path, tokenizer, recipe):
    cfg = load_recipe(RLConfig, recipe({"model.path": path}), []).cfg
    prompts = [Prompt(id="text", messages=READS), Prompt(id="seen", messages=[say("user", "a" * 30, *[draw(1)] * 20)])]
    probe = make_probe(cfg, tokenizer, prompts)
    whole, places = read(tokenizer, prompts[1].messages)
    assert probe.token_ids == whole[: len(probe.token_ids)] and places[0].end <= probe.images[-1].end
    assert len(probe.images) > 1 and probe.images == places[: len(probe.images)]
    assert len(probe.token_ids) <= places[0].end + 64
    assert all(place.end <= len(probe.token_ids) for place in probe.images)
    assert make_probe(cfg, tokenizer, prompts[:1]).images == ()


def test_an_engine_without_images_is_refused_before_the_start(path, tiny_path, recipe, tmp_path):
    file = tmp_path / "blind.py"
    file.write_text("from rollouts.engines.base import Engine\n\n\nclass Blind(Engine):\n    pass\n")
    blind = load_recipe(RLConfig, recipe({"model.path": path, "rollout.engine": str(file)}), []).cfg
    with pytest.raises(UserError, match=r"model\.path=.* rollout\.engine=.*blind\.py does not support images"):
        check_images(blind)
    for fine in ({"model.path": path}, {"rollout.engine": str(file)}):
        check_images(load_recipe(RLConfig, recipe(fine), []).cfg)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    given = [f"model.path={path}", f"data.sets=[{{path: {rows}}}]", "rollout.num_engines=1", "backend=local"]
    with pytest.raises(UserError, match=r"blind\.py does not support images"):
        prepare_eval(load_eval_recipe(EVAL, [*given, f"rollout.engine={file}"]))


def test_a_family_is_refused_where_vllm_lacks_a_package_for_it(path, recipe, monkeypatch):
    cfg = load_recipe(RLConfig, recipe({"model.path": path, "rollout.engine": "vllm"}), []).cfg
    monkeypatch.setattr(architectures, "can_import", lambda name: False)
    check_images(cfg)  # an Idefics3, which needs none
    with pytest.raises(UserError, match=r"qwen3_vl model, which .* only with torchvision: .* whl/cpu.*engine=hf"):
        architectures.check_family("qwen3_vl", path=path, dtype="float32")
    with pytest.raises(UserError, match="only with torchvision and num2words"):
        architectures.check_family("smolvlm", path=path, dtype="float32")
    monkeypatch.setattr(architectures, "can_import", lambda name: True)
    architectures.check_family("smolvlm", path=path, dtype="float32")


def test_a_family_is_refused_in_a_dtype_that_vllm_rounds(recipe, tmp_path):
    AutoConfig.for_model("apertus").save_pretrained(tmp_path / "apertus")
    own = {"model.path": str(tmp_path / "apertus"), "rollout.engine": "vllm"}
    with pytest.raises(
        UserError, match=r"activations to bfloat16 .*: set model\.dtype=bfloat16 instead of float32, or"
    ):
        check_images(load_recipe(RLConfig, recipe(own | {"model.dtype": "float32"}), []).cfg)
    for fine in ({"model.dtype": "bfloat16"}, {"model.dtype": "float32", "rollout.engine": "hf"}):
        check_images(load_recipe(RLConfig, recipe(own | fine), []).cfg)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_images_that_vllm_computes_otherwise_are_sampled_by_transformers(family):
    config = seeing.make_config(family)
    with pytest.raises(UserError, match=rf"is a {family} model with images: .*engine=hf, or model\.images=off"):
        architectures.check_images(config, path="m")
    architectures.check_images(seeing.make_config("idefics3"), path="m")


def test_vllm_counts_the_tokens_of_an_image_as_the_processor_does(tmp_path):
    """In a causal Gemma 4; vLLM counts by the config, and would end with an error at the first image."""
    path = seeing.save_model(tmp_path, "gemma4")
    config = seeing.make_config("gemma4")
    config.get_text_config().use_bidirectional_attention = None
    architectures.check_images(config, path=path)
    config.vision_config.default_output_length = 280
    with pytest.raises(UserError, match=r"up to 70 tokens by max_soft_tokens .* and 280 by .*engine=hf, or"):
        architectures.check_images(config, path=path)
    del config.vision_config.default_output_length
    with pytest.raises(UserError, match=r"up to 70 tokens .* and None by"):
        architectures.check_images(config, path=path)


@pytest.mark.parametrize(("engine", "images"), [("vllm", "off"), ("hf", "auto")])
def test_gemma_is_used_for_text_where_the_engine_cannot_read_its_images(engine, images, tmp_path, recipe):
    path = seeing.save_model(tmp_path, "gemma3")
    loaded = load_recipe(RLConfig, recipe({"model.path": path, "rollout.engine": engine}), [])
    assert loaded.cfg.model.images == images
    assert loaded.why_text.startswith("the model is used for text only") == (images == "off")
    evaluated = EvalConfig.model_validate(
        {
            "name": "e",
            "model": {"path": path},
            "data": {"sets": [{"path": "x"}]},
            "rollout": {"engine": engine, "max_new_tokens": 4},
            "reward": {"function": "arithmetic"},
        }
    )
    assert settle_eval_images(evaluated)[0] == images
    text = evaluated.model_copy(update={"model": evaluated.model.model_copy(update={"images": "off"})})
    assert settle_eval_images(text) == ("off", ""), "who asks for it is told nothing"


REFUSES = """
from core.errors import UserError
from rollouts.engines.hf import HfEngine

class Mine(HfEngine):
    @classmethod
    def check_images(cls, config, *, path):
        raise UserError("this engine draws images upside down: set model.images=off for text")
"""


@pytest.mark.parametrize("program", ["training", "evaluation"])
def test_a_run_says_why_a_model_that_sees_gets_text_only(program, tmp_path, trained, recipe, sums, capfd):
    seeing_model = {"path": seeing.save_model(tmp_path, "gemma3"), "dtype": "float32"}
    rollout = {"engine": file_of(tmp_path / "mine.py", REFUSES), "max_new_tokens": 4}
    if program == "training":
        folder = trained({"model": seeing_model, "rollout": rollout, "data.template": "plain", "steps": 1})
        assert metrics_of(folder)[0]["train/mismatch/abs_logp"] < BOUND
    else:
        data = {"sets": [{"path": str(sums / "eval.parquet"), "rows": 2}], "max_prompt_tokens": 32, "template": "plain"}
        whole = {"name": "e", "backend": "local", "run_dir": str(tmp_path / "runs"), "model": seeing_model}
        whole |= {"data": data, "rollout": rollout, "reward": {"function": "arithmetic", "workers": 1}}
        (tmp_path / "eval.yaml").write_text(yaml.safe_dump(whole))
        assert run_here(main_eval, "--config", str(tmp_path / "eval.yaml")) == (0, "")
    lines = capfd.readouterr().out.splitlines()
    assert (
        "the model is used for text only, as with model.images=off: this engine draws images upside down: set "
        "model.images=off for text"
    ) in lines, lines


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_the_hf_engine_lets_tokens_of_an_image_see_each_other(family, tmp_path):
    """Two prompts of other lengths in one batch, so that one is padded on the left."""
    folder = seeing.save_model(tmp_path, family)
    processor, plain = ImageProcessor(folder), load_plain(folder)
    banned = sorted(processor.placeholder_ids)
    allowed = AllowedTokens(banned=tuple(banned))
    only = {"stop_token_ids": [], "temperature": TEMPERATURE, "max_model_len": 512, "dtype": "float32"}
    engine = HfEngine(engine_config(folder, allowed_tokens=allowed, **only))
    prompts = [write_ids(processor, *parts) for parts in PARTS]

    async def sample() -> list[Completion]:
        calls = (engine.generate(ids, max_new_tokens=8, seed=1, images=places) for ids, places in prompts)
        return await asyncio.gather(*calls)

    for (ids, places), done in zip(prompts, asyncio.run(sample()), strict=True):
        assert gap_of_sample(plain, folder, as_sample(ids, places, done), TEMPERATURE, banned) < BOUND
        probed = asyncio.run(engine.probe(ids, images=places))
        want = plain_logp(plain, folder, ids, places)[[i - 1 for i in list_written(len(ids), places)]]
        assert probed == pytest.approx(want.tolist(), abs=BOUND)


def test_a_package_that_is_built_for_another_torch_counts_as_missing(tmp_path, monkeypatch):
    (tmp_path / "built_for_cuda.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.syspath_prepend(tmp_path)
    assert not architectures.can_import("built_for_cuda") and not architectures.can_import("not_there_at_all")
    assert architectures.can_import("json")


def test_a_prompt_is_collapsed_to_one_token_per_image_and_expanded_again(tokenizer):
    processor = tokenizer.images
    for messages in (READS, LOOKS, COMPARES):
        ids, places = read(tokenizer, messages)
        prompt = make_prompt(ids, places, processor.placeholder_id)
        collapsed = prompt["prompt_token_ids"]
        assert collapsed.count(processor.placeholder_id) == len(places)
        waiting = iter(places)
        again = [
            i
            for token in collapsed
            for i in (processor.expand(next(waiting).image).ids if token == processor.placeholder_id else [token])
        ]
        check_prompt(again, ids)
        assert ("multi_modal_data" in prompt) == bool(places)
        assert prompt.get("multi_modal_uuids", {"image": []})["image"] == [place.image.hash for place in places]
    assert collapse_images([1, 2, 3], [], 7) == [1, 2, 3]
    with pytest.raises(RunStopped, match=r"expanded a prompt .* to 5 tokens, .* to 4 .first difference at token 2"):
        check_prompt([1, 2, 9, 9, 3], [1, 2, 3, 4])


def test_an_agent_gets_images_as_data_uris_and_may_send_them_back():
    image = draw(1)
    task = Task(base_url="u", api_key="k", model="policy", messages=LOOKS)
    [sent] = task.as_json()["messages"]
    assert sent["content"][1]["image_url"]["url"] == write_data_uri(image)
    assert read_ask({"model": "policy", "messages": [sent]}, temperature=1.0).messages == LOOKS
    broken = base64.b64encode(image.data[:40]).decode()
    for url in ("https://example.org/a.png", "data:image/png;base64,@@", f"data:image/png;base64,{broken}"):
        body = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        with pytest.raises(BadRequest, match=r"messages\[0\]\.content\[0\]: (the|an) "):
            read_ask({"model": "policy", "messages": [body]}, temperature=1.0)


class Seeing(Policy):
    """Scripted policy that notes which images it is shown."""

    async def generate(self, token_ids, *, max_new_tokens, seed, images=()):
        self.seen = [*getattr(self, "seen", []), images]
        return await super().generate(token_ids, max_new_tokens=max_new_tokens, seed=seed)


def test_images_of_an_agents_requests_are_in_its_samples(tokenizer, tiny_path):
    policy = Seeing(tokenizer, ["two", "three"])

    async def go() -> list[Branch]:
        session = make_session(policy, Prompt(id="p", messages=LOOKS))
        said: list[Message] = [*LOOKS]
        for n in range(2):
            ask = read_ask({"model": "policy", "messages": [*map(write_content, said)]}, temperature=1.0)
            async with session.answering(Request(ask=ask, digest=str(n))) as answer:
                said += [answer.message, say("user", "and ", draw(7, 90, 30))]
        return session.trace.list_branches()

    [branch] = asyncio.run(go())
    check_exact([branch], policy.log)
    assert [place.image for place in branch.images] == [draw(1), draw(7, 90, 30)]
    assert branch.images == tokenizer.place(branch.ids, [draw(1), draw(7, 90, 30)])
    assert policy.seen == [branch.images[:1], branch.images]

    async def ask_a_blind_one() -> None:
        session = make_session(Policy(ChatTokenizer(tiny_path, "plain"), ["no"]))
        async with session.answering(Request(ask=ChatRequest(messages=LOOKS, tools=[]), digest="")):
            pass

    with pytest.raises(BadRequest, match="sees no images"):
        asyncio.run(ask_a_blind_one())
