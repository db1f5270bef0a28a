"""rollout.batch_invariant: tokens are drawn from the trainer's log-probabilities to the bit, or the run stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import main_rl
from configs.eval_schema import EvalConfig
from configs.schema import RLConfig
from core.errors import RunStopped, UserError
from driver.checks.engine import check_engine
from driver.load_recipe import load_recipe
from driver.program import launch_run
from driver.rl.run import Run
from driver.rl.setup import prepare, start
from modeling.attention_fixed import use_fixed_order
from unit_tests.helpers.seeing import make_config

pytestmark = pytest.mark.one_core

CLAIM = {"rollout.batch_invariant": True, "rollout.max_new_tokens": 24, "rollout.temperature": 0.7, "steps": 1}


def run(path: str, change: Callable[[Any, Any], object]) -> None:
    """Run a recipe; change: is called with the engine and the trainer once they have started."""

    async def train(started: Run) -> None:
        worker: Any = started.generation.workers
        trainer: Any = started.trainers
        change(worker.worker.engine, trainer.worker)
        await main_rl.train(started)

    launch_run(load_recipe(RLConfig, path, []), prepare, start, train)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float32", {}), ("bfloat16", {"updates_per_step": 2, "trainer.micro_batch_tokens": 80})],
    ids=["float32", "bfloat16 in several updates"],
)
def test_the_logits_of_every_draw_are_those_of_the_training_pass(recipe, dtype, changes):
    drawn, trained = set[bytes](), list[bytes]()

    def keep(model: Any, add: Callable[[list[bytes]], object]) -> None:
        def note(_module: Any, _args: Any, out: torch.Tensor) -> None:
            add([row.float().numpy().tobytes() for row in out.detach().flatten(0, -2)])

        model.get_output_embeddings().register_forward_hook(note)

    def keep_both(engine: Any, trainer: Any) -> None:
        keep(engine.model, drawn.update)
        keep(trainer.model, lambda rows: torch.is_grad_enabled() and trained.extend(rows))

    if "updates_per_step" in changes:
        changes = changes | {"trainer.lr": 1e-12}  # no weight of bfloat16 changes between the updates
    run(recipe(CLAIM | {"model.dtype": dtype} | changes), keep_both)
    assert len(trained) > 200 and {*trained} <= drawn


@pytest.mark.slow
def test_another_order_of_keys_in_the_trainer_alone_stops_the_run(recipe):
    def perturb(_engine: Any, trainer: Any) -> None:
        usual = trainer.forward

        def forward(*args: Any, **settings: Any) -> Any:
            use_fixed_order(trainer.model, key_block=16)
            try:
                return usual(*args, **settings)
            finally:
                use_fixed_order(trainer.model)

        trainer.forward = forward

    for updates in (1, 2):  # noticed in the training pass, and in that of prox_logp
        with pytest.raises(RunStopped, match=r"token \d+ \(.*\) of sample \d+ .* drawn with .*the trainer computes"):
            run(recipe(CLAIM | {"updates_per_step": updates}), perturb)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "ray"}, "set backend to local"),
        ({"rollout.engine": "vllm"}, "set rollout.engine to hf"),
        ({"max_staleness": 1}, "max_staleness=1 .*set it to 0"),
        ({"model.lora": {}}, "leave model.lora out"),
        ({"rollout.quantization": "int8"}, "leave it out"),
        ({"rollout.top_k": 4}, "leave rollout.top_p, top_k and min_p out"),
        ({"rollout.router_replay": "watch"}, "leave rollout.router_replay out"),
        ({"trainer.compile": True}, "leave trainer.compile out"),
        ({"model.attention": "eager"}, "set model.attention to auto"),
    ],
    ids=str,
)
def test_what_has_another_order_is_refused(recipe, changes, words):
    with pytest.raises(UserError, match=f"rollout.batch_invariant is true, and .*{words}"):
        check_engine(load_recipe(RLConfig, recipe(CLAIM | changes), []).cfg)


def test_images_and_an_evaluation_have_no_claim(recipe, tmp_path):
    make_config("qwen2_5_vl").save_pretrained(tmp_path / "sees")
    with pytest.raises(UserError, match=r"rollout.batch_invariant is true, and images .*set model.images to off"):
        check_engine(load_recipe(RLConfig, recipe(CLAIM | {"model.path": str(tmp_path / "sees")}), []).cfg)
    evaluation = {"name": "eval", "model": {"path": "here"}, "data": {"sets": [{"path": "rows.jsonl"}]}}
    evaluation |= {"reward": {"function": "arithmetic"}, "rollout": {"engine": "hf", "batch_invariant": True}}
    with pytest.raises(UserError, match=r"batch_invariant is a claim about a trainer, .* leave it out"):
        check_engine(EvalConfig.model_validate(evaluation))
