"""Frozen models of a recipe: checked before a run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from algs.base import PolicyGradient
from algs.opd import OPD
from algs.teachers import Teacher
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.models import check_policy, check_teacher_models
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.small_trained import edit


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


def test_a_frozen_model_reads_the_longest_sample(tiny_path: str, tmp_path: Path):
    """Beyond its positions a model computes log-probabilities, of which nothing says that they are wrong."""
    tokenizer, model = ChatTokenizer(tiny_path, "chat"), ModelConfig(path=tiny_path)
    short = str(shutil.copytree(tiny_path, tmp_path / "short"))
    edit(tmp_path / "short/config.json", max_position_embeddings=50)
    check_teacher_models(OPD(teacher=short), tokenizer, model, longest=50)
    check_policy(model, tokenizer, short, longest=50)
    says = (
        f"a sample may reach 51 tokens, and {{}} names the model {short}, which has 50 positions: lower data.max_tokens"
    )
    with pytest.raises(UserError, match=says.format("alg")):
        check_teacher_models(OPD(teacher=short), tokenizer, model, longest=51)
    with pytest.raises(UserError, match=says.format("rollout.opponent")):
        check_policy(model, tokenizer, short, longest=51)


def test_a_frozen_model_without_a_tokenizer_is_named_by_its_own_key(tiny_path: str, tmp_path: Path):
    tokenizer, model = ChatTokenizer(tiny_path, "chat"), ModelConfig(path=tiny_path)
    broken = str(shutil.copytree(tiny_path, tmp_path / "broken"))
    (tmp_path / "broken/tokenizer.json").write_text("{")
    says = f"{{}}={broken}: its tokenizer cannot be loaded: "
    assert tell(lambda: check_teacher_models(OPD(teacher=broken), tokenizer, model)).startswith(says.format("alg"))
    assert tell(lambda: check_policy(model, tokenizer, broken)).startswith(says.format("rollout.opponent"))


class Unread(PolicyGradient):
    """Has a teacher whose column its loss does not ask for."""

    @property
    def teachers(self):
        return super().teachers | {"told": Teacher("live", prompt=lambda sample, group: None)}


def test_a_teacher_that_fills_no_column_is_refused_before_the_start(tiny_path: str):
    tokenizer, model = ChatTokenizer(tiny_path, "chat"), ModelConfig(path=tiny_path)
    assert tell(lambda: check_teacher_models(Unread(), tokenizer, model)) == (
        "alg: the teacher told fills told, which required_columns does not name: add it"
    )
