"""Save the trained model: weights, tokenizer, model card and recipe in one folder, read back before it counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from algs.base import Algorithm
from configs.schema import RunConfig
from core.cluster.workers import Workers
from core.types.weights import SavedModel
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.output_folder import save_in_one_step
from driver.records.model_card import write_card
from modeling.saved_model import check_saved, write_stop_tokens
from trainers.trainer import Trainer


async def write_model(
    folder: Path,
    trainers: Workers[Trainer],
    tokenizer: ChatTokenizer,
    cfg: RunConfig,
    *,
    run: Path,
    steps: int,
    say: Callable[[str], None],
    which: SavedModel = "policy",
) -> None:
    """Write the model to `folder` in one step. Raises SavedModelWrong if what is read back is not the model.

    run: the run folder. steps: steps done. say: prints a sentence.
    """
    told: list[str] = []

    async def write(partial: Path) -> None:
        corrected = await trainers.call_all(Trainer.save_model, partial, which)
        tokenizer.save(partial)
        write_stop_tokens(partial, eos=tokenizer.hf.eos_token_id, stops=tokenizer.stop_token_ids)
        write_card(partial, cfg, run=run, steps=steps, which=which)
        n = check_saved(partial, dtype=cfg.model.dtype, trust_remote_code=cfg.model.trust_remote_code)
        told.extend(sentence for sentences in corrected for sentence in sentences)
        told.append(f"saved {folder}: {n} tensors, read back")

    await save_in_one_step(folder, write, {"run": str(run), "steps": steps})
    for sentence in told:
        say(sentence)


async def write_value_model(folder: Path, trainers: Workers[Trainer], cfg: RunConfig, *, run: Path, steps: int) -> None:
    """Write the value model with its card, and read it back as `write_model` does."""
    await trainers.call_all(Trainer.save_model, folder, "value")
    write_card(folder, cfg, run=run, steps=steps, which="value")
    check_saved(folder, dtype=cfg.model.dtype, trust_remote_code=cfg.model.trust_remote_code)


def list_writes(
    write: Callable[..., Awaitable[None]],
    trainers: Workers[Trainer],
    cfg: RunConfig,
    alg: Algorithm,
    *,
    run: Path,
    steps: int,
    push: Callable[[str, Path], Awaitable[None]],
) -> list[Callable[[], Awaitable[None]]]:
    """Return the calls that save all models of a run, in order: those in `run`, then `save_to`, and last the upload.

    write: writes a model into a folder. push: uploads one that is written.
    """
    writes = [partial(write, run / "model")]
    if cfg.trainer.ema is not None:
        writes.append(partial(write, run / "model_ema", which="ema"))
    if alg.value_lr is not None:
        writes.append(partial(write_value_model, run / "value_model", trainers, cfg, run=run, steps=steps))
    if cfg.save_to is not None:
        writes.append(partial(write, Path(cfg.save_to).absolute()))
    if cfg.push_to is not None:
        writes.append(partial(push, cfg.push_to, run / "model"))
    return [*writes]
