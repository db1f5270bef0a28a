"""Rows with the likeliest tokens of a teacher, for distillation without the teacher (alg.name: distill).

    python -m data_prep.distill --config my_sft.yaml --model models/teacher --out data/distilled.parquet --top 16

The rows are those of data.train of a supervised recipe, with its template and its limits, so that the tokens are those
that the student trains on. `extra` gets topk_tokens (the trained tokens), topk_ids and topk_logp (the teacher's
likeliest ids and their log-probabilities at temperature 1, for each of them). The teacher must have the student's
tokenizer. One row at a time: memory does not grow with the number of rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.load import read_recipe, validate
from configs.schema import SLConfig
from core.errors import UserError
from core.types.messages import find_images
from core.types.samples import Sample
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.feed import load_groups
from data_prep.rows import Row, write_rows
from data_prep.script import read_options, rows_file, run_script, whole
from driver.checks.models import check_frozen
from modeling.hf_config import check_model_folder
from modeling.layout_probe import set_exact_attention
from modeling.load import load_model

if TYPE_CHECKING:
    from torch import nn

DECIMALS = 4
"""Decimals of a stored log-probability: a rounding of 5e-5 nats."""


def make(config: str, model: str, out: Path, *, top: int = 16) -> None:
    """Write the rows of a recipe with a teacher's `top` likeliest tokens. Raises UserError for a bad file or key."""
    cfg: SLConfig = validate(SLConfig, read_recipe(config), prefix="")
    check_model_folder(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    tokenizer = make_tokenizer(cfg.model, cfg.data)
    use = "name likely tokens of the same rows"
    check_frozen(model, tokenizer, cfg.model, key="--model", use=use, longest=cfg.data.max_tokens)
    feed = load_groups(cfg.data, "train", tokenizer, rows="conversations", seed=cfg.seed)
    if lazy := [source.name for source in feed.sources if source.is_lazy]:
        raise UserError(f"data.train: {lazy[0]} is read from disk row by row, and all rows are needed: set lazy: false")
    if unfit := next((row for [row] in feed.all() if not _is_json(row.prompt.extra)), None):
        raise UserError(f"the row {unfit.prompt.id} has a column that cannot be written as JSON, such as a date")
    teacher = load_model(model, dtype="float32", attention="auto", key="--model")
    set_exact_attention(teacher, device="cpu")
    ids_below = 1 + max(tokenizer.hf.get_vocab().values())
    write_rows(out, [describe(sample, teacher, top, ids_below) for [sample] in feed.all()])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def describe(sample: Sample, teacher: nn.Module, top: int, ids_below: int) -> Row:
    """Return the row of a sample, with the teacher's likeliest tokens in `extra`.

    ids_below: first id that the tokenizer lacks. A model may have more, which the student's need not have.
    """
    import torch

    prompt = sample.prompt
    if find_images(prompt.messages):
        raise UserError(f"the row {prompt.id} has images, and a teacher's distribution is stored for text only")
    ids = torch.from_numpy(sample.token_ids.astype("int64"))
    # the logits at t predict token t + 1
    at = torch.from_numpy(sample.loss_mask[1:].nonzero()[0])
    hf: Any = teacher
    with torch.inference_mode():
        scores = hf(ids[None]).logits[0, at].float().log_softmax(-1)
    logp, likeliest = scores[:, :ids_below].topk(min(top, ids_below))
    stored = {
        "topk_tokens": ids[at + 1].tolist(),
        "topk_ids": likeliest.tolist(),
        "topk_logp": [[round(x, DECIMALS) for x in row] for row in logp.tolist()],
    }
    tools = json.dumps(prompt.tools) if prompt.tools else None
    extra = json.dumps({**prompt.extra, **stored})
    return Row(id=prompt.id, messages=prompt.messages, answer=prompt.answer, tools=tools, extra=extra)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.distill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", required=True, help="a supervised recipe, for its rows and their template")
    parser.add_argument("--model", required=True, help="the teacher, with the tokenizer of the recipe's model")
    parser.add_argument("--out", type=rows_file, required=True, help="a name that ends in .parquet or .jsonl")
    parser.add_argument("--top", type=whole(1), default=16, help="tokens stored per position (default %(default)s)")
    make(**read_options(parser, argv))


if __name__ == "__main__":
    run_script(main)
