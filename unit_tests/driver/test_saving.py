"""What a run saves: it stops as the run did, it is read back, and it says where it comes from."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GenerationConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

import main_rl
import main_sl
from configs.schema import SLConfig
from core.cluster.workers import Local
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.load_recipe import load_recipe
from driver.saving import write_model
from modeling.model_files import explain_gap
from modeling.saved_model import SavedModelWrong
from trainers.local import LocalTrainer
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import ROOT, folder_of
from unit_tests.helpers.small_trained import a_base, edit, rewrite

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
    (tmp_path / "config.yaml").write_text("name: test\n")
    folder, said = tmp_path / "model", []
    tokenizer = ChatTokenizer(tiny_path, "chat")
    with pytest.raises(SavedModelWrong, match=r"its files lack model\.norm\.weight.* is left in .*/model\.partial"):
        asyncio.run(write_model(folder, Local(trainer), tokenizer, cfg, run=tmp_path, steps=1, say=said.append))
    assert not folder.exists() and not said, "it does not count as saved"
    assert (tmp_path / "model.partial" / "model.safetensors").is_file(), "nothing that was trained is thrown away"


def test_what_cannot_be_copied_is_whole_in_the_run_folder(recipe, tmp_path):
    (tmp_path / "copy.partial").touch()  # where the copy would be written
    path = recipe({"save_to": str(tmp_path / "copy"), "trainer.ema": 0.5, "steps": 1}, kind="sl")
    code, err = run_here(main_sl, "--config", path)
    assert code == 1 and re.search(r"/copy cannot be written: Not a directory; the model is not saved there", err), err
    folder = folder_of(tmp_path)
    assert (folder / "model/config.json").is_file() and (folder / "model_ema/config.json").is_file()


@pytest.fixture
def own_head(base) -> Path:
    """A model whose config ties the head, and whose files hold a head of its own."""
    edit(base / "config.json", tie_word_embeddings=True)
    return base


def test_a_head_that_only_the_config_ties_is_trained_and_saved_untied(own_head, trained):
    saved = trained({"model.path": str(own_head), "steps": 1}) / "model"
    assert AutoConfig.from_pretrained(saved).tie_word_embeddings is False
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_an_engine_that_ties_such_a_head_is_told_the_cause(own_head, recipe):
    engine = str(ROOT / "unit_tests/helpers/planted_engines/follows_config.py")
    code, err = run_here(main_rl, "--config", recipe({"model.path": str(own_head), "rollout.engine": engine}))
    assert code == 1 and "log-probabilities of the probe prompt differ" in err, err
    assert "the head is tied in the config and not in the file, which holds lm_head.weight" in err
    assert "set tie_word_embeddings to false in config.json" in err


def test_what_may_be_the_cause_is_known_of_ties_and_mixtures(tiny_path, tmp_path):
    assert explain_gap(tiny_path) == ""
    tied = a_base(tmp_path / "tied", tied=True)
    assert "sent once, so the engine must use one tensor for both" in explain_gap(tied)
    for config in (
        MixtralConfig(num_local_experts=8, tie_word_embeddings=False),
        Qwen3MoeConfig(num_experts=8, tie_word_embeddings=False),
        DeepseekV3Config(n_routed_experts=8, tie_word_embeddings=False),
    ):
        config.save_pretrained(tmp_path / "mixture")
        assert "mixture of experts" in explain_gap(str(tmp_path / "mixture")), type(config)
