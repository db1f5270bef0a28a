"""Ranks that share a model read the distributions of a teacher as a single process does, with the head in chunks."""

from __future__ import annotations

import pytest

from configs.trainer_schema import LoraConfig
from unit_tests.helpers.examples import some_groups
from unit_tests.helpers.models import random_model
from unit_tests.helpers.ray_trainers import FSDP2, LATER, SMALL, check_update, sharded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("stage", "lora", "tied"),
    [
        (FSDP2, None, True),
        (3, None, False),
        pytest.param(FSDP2, None, False, marks=LATER),
        pytest.param(1, None, True, marks=LATER),
        pytest.param(3, LoraConfig(r=4), False, marks=LATER),
        pytest.param(FSDP2, LoraConfig(r=4), True, marks=LATER),
    ],
)
def test_a_teacher_is_read_on_every_rank(ranks, tmp_path, stage, lora, tied):
    """One rank cuts its head while the other need not. With an adapter the teacher is the model without it."""
    random_model("llama", vocab_size=4096, tie_word_embeddings=tied).save_pretrained(path := str(tmp_path / "model"))
    random_model("qwen3", vocab_size=4096, tie_word_embeddings=tied).save_pretrained(tmp_path / "teacher")
    exact = {"name": "grpo", "kl": {"coef": 10.0, "estimator": "full_forward"}}
    alg = exact if lora else {"name": "gkd", "teacher": str(tmp_path / "teacher")}
    how = sharded(stage) | {"ranks": 2, "deepspeed": SMALL if stage == 3 else {}}
    same = {"alg": alg, "lora": lora, "logits_mib": 0}
    check_update(ranks, path, some_groups(4, 3), max_tokens=60, same=same, logits_mib=1, **how)
