"""Checks of the models that a run reads, before anything is started."""

from __future__ import annotations

from algs.base import Algorithm
from core.errors import UserError
from data_feeds.tokenizer import ChatTokenizer
from modeling.hf_config import check_model_folder, read_config
from modeling.load import check_weights


def check_policy(path: str, tokenizer: ChatTokenizer) -> None:
    """Raise UserError where the model's files do not fit its config, or its tokenizer has ids without an embedding."""
    check_weights(path)
    _check_vocabulary(path, tokenizer, key="model.path")


def check_frozen_models(alg: Algorithm, tokenizer: ChatTokenizer, path: str) -> None:
    """Raise UserError for a frozen model that cannot be loaded, or has another vocabulary than the policy."""
    for frozen in filter(None, alg.frozen_models.values()):
        check_model_folder(frozen, key="alg")
        if tokenizer.hf.get_vocab() != ChatTokenizer(frozen, "plain", key="alg").hf.get_vocab():
            raise UserError(
                f"alg names the model {frozen}, whose vocabulary is not that of model.path={path}, so it cannot "
                "compute log-probabilities of the same tokens: take one with the same tokenizer"
            )
        check_weights(frozen, key="alg")
        _check_vocabulary(frozen, tokenizer, key="alg")


def _check_vocabulary(path: str, tokenizer: ChatTokenizer, *, key: str) -> None:
    rows = read_config(path, key=key).get_text_config().vocab_size
    largest = max(tokenizer.hf.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"{key}={path}: its tokenizer has ids up to {largest}, and the model has {rows} embeddings: resize them "
            "(model.resize_token_embeddings), or use the tokenizer that the model was trained with"
        )
