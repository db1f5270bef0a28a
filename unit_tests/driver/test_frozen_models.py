"""Frozen models of a recipe: checked before a run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from algs.opd import OPD
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.models import check_teacher_models


def test_a_teacher_is_read_before_the_run_starts(tiny_path: str, tmp_path: Path):
    tokenizer, model = ChatTokenizer(tiny_path, "chat"), ModelConfig(path=tiny_path)
    teacher = Path(shutil.copytree(tiny_path, tmp_path / "teacher"))
    alg = OPD(teacher=str(teacher))
    check_teacher_models(alg, tokenizer, model)
    smaller = AutoModelForCausalLM.from_pretrained(tiny_path)
    smaller.resize_token_embeddings(20)
    smaller.save_pretrained(teacher)
    with pytest.raises(UserError, match=f"alg={teacher}: its tokenizer has ids up to .* the model has 20 embeddings"):
        check_teacher_models(alg, tokenizer, model)
    (teacher / "config.json").unlink()
    with pytest.raises(UserError, match=f"alg={teacher}"):
        check_teacher_models(alg, tokenizer, model)
