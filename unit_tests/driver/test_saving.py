"""What a run saves: it stops as the run did, it is read back, and it says where it comes from."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from configs.schema import SLConfig
from core.cluster.workers import Local
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.load_recipe import load_recipe
from driver.saving import write_model
from modeling.saved_model import SavedModelWrong
from trainers.local import LocalTrainer
from unit_tests.helpers.small_trained import edit, rewrite

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def base(tiny_path, tmp_path) -> Path:
    """A copy of the tiny model, to be changed."""
    return Path(shutil.copytree(tiny_path, tmp_path / "base"))


def test_an_invalid_generation_config_is_saved_and_told(base, trained, capsys):
    edit(base / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)
    folder = trained({"model.path": str(base), "steps": 1}, kind="sl")
    assert "generation_config.json of the base model is invalid (temperature=0.6, top_p=0.9)" in capsys.readouterr().out
    saved = GenerationConfig.from_pretrained(folder / "model")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.6, 0.9)


@pytest.mark.parametrize("has_generation_config", [True, False])
def test_a_saved_model_stops_at_the_tokenizers_corrected_end(has_generation_config, base, trained):
    tokenizer = AutoTokenizer.from_pretrained(base)
    end = tokenizer.eos_token_id
    stale = tokenizer.convert_tokens_to_ids("7")
    # as where a user has corrected the tokenizer alone
    edit(base / "config.json", eos_token_id=stale)
    if has_generation_config:
        edit(base / "generation_config.json", eos_token_id=stale)
    else:
        (base / "generation_config.json").unlink()
    folder = trained({"model.path": str(base), "steps": 1}, kind="sl") / "model"
    assert AutoConfig.from_pretrained(folder).eos_token_id == end
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert end in (ends if isinstance(ends, list) else [ends])
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.register_forward_hook(
        lambda _head, _args, logits: logits.zero_().index_fill_(-1, torch.tensor(end), 1)
    )
    ids = model.generate(tokenizer("1+2", return_tensors="pt").input_ids, max_new_tokens=8, do_sample=False)
    assert ids[0].tolist().count(end) == 1 and ids[0, -1] == end


class Losing(LocalTrainer):
    """Trainer that loses a tensor as it writes the model."""

    def write_model(self, learner, folder, scopes) -> list[str]:
        done = super().write_model(learner, folder, scopes)
        rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
        return done


def test_a_save_that_is_not_the_model_is_a_loud_error(tiny_path, recipe, tmp_path):
    loaded = load_recipe(SLConfig, recipe(kind="sl"), [])
    cfg = loaded.cfg
    trainer = Losing(cfg.model, cfg.trainer, loaded.alg, temperature=1.0, total_updates=1)
    folder, said = tmp_path / "model", []
    tokenizer = ChatTokenizer(tiny_path, "chat")
    with pytest.raises(SavedModelWrong, match=r"its files lack model\.norm\.weight.* is left in .*/model\.partial"):
        asyncio.run(write_model(folder, Local(trainer), tokenizer, cfg, run=tmp_path, steps=1, say=said.append))
    assert not folder.exists() and not said, "it does not count as saved"
    assert (tmp_path / "model.partial" / "model.safetensors").is_file(), "nothing that was trained is thrown away"
