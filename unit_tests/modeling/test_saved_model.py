"""Saved models: what transformers refuses to save, stop tokens, and the reading back of every kind of save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from configs.trainer_schema import LoraConfig
from modeling.saved_model import SavedModelWrong, check_saved, correct_generation_config
from unit_tests.helpers.small_trained import IDS, a_base, edit, logits, rewrite, trained

pytestmark = [pytest.mark.one_core, pytest.mark.usefixtures("one_thread")]

READ = """
import os, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    auto = AutoPeftModelForCausalLM if os.path.exists(folder + "/adapter_config.json") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    scores = model(torch.arange(2, 40)[None]).logits[0, :-1].log_softmax(-1)
    print(*scores.gather(-1, torch.arange(3, 40)[:, None])[:, 0].tolist())
"""


def read_in_a_fresh_process(*folders: Path) -> list[torch.Tensor]:
    """Return the log-probabilities of each model, read by transformers and PEFT without this code."""
    command = [sys.executable, "-c", READ, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [torch.tensor([float(x) for x in line.split()]) for line in done.stdout.splitlines()]


def logp_of(model) -> torch.Tensor:
    return logits(model)[0, :-1].log_softmax(-1).gather(-1, IDS[0, 1:, None])[:, 0]


INVALID = {
    # Llama-2-chat's; it was meant to be sampled from
    "temperature": ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    "greedy": ({"temperature": 0.0, "top_p": 0.9}, {"do_sample": None, "temperature": None, "top_p": None}),
    "min_p": ({"min_p": 0.1}, {"do_sample": True, "min_p": 0.1}),
    "beams": ({"length_penalty": 2.0}, {"length_penalty": None, "do_sample": None}),
    "padding": ({"pad_token_id": -1, "top_k": 7}, {"pad_token_id": None, "top_k": 7, "do_sample": True}),
    "scores": ({"output_scores": True}, {"output_scores": None}),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_generation_config_that_cannot_be_saved_is_corrected(case, tmp_path):
    given, wanted = INVALID[case]
    config = GenerationConfig(eos_token_id=7)
    for name, value in given.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match="Fix these issues"):
        config.save_pretrained(tmp_path)
    said = correct_generation_config(config)
    assert said is not None and all(name in said for name in given)
    config.save_pretrained(tmp_path)
    again = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in wanted} == wanted and again.eos_token_id == 7


def test_a_valid_generation_config_is_left_alone():
    config = GenerationConfig(do_sample=True, temperature=0.6)
    before = config.to_dict()
    assert correct_generation_config(config) is None and config.to_dict() == before


@pytest.mark.parametrize("kind", ["whole", "merged"])
def test_an_invalid_generation_config_does_not_lose_the_model(kind, tmp_path):
    base = a_base(tmp_path / "base", temperature=0.6, top_p=0.9)
    trainer = trained(base, LoraConfig(r=4, merge_on_save=True) if kind == "merged" else None, steps=1)
    [said] = trainer.save_model(tmp_path / "out")
    assert "temperature=0.6" in said and "do_sample=true" in said
    assert check_saved(tmp_path / "out", dtype="float32") > 10
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6


KINDS = {
    "whole": {},
    "tied": {"tied": True},
    "own head": {"tied": True, "own_head": True},
    "bfloat16": {"dtype": "bfloat16"},
    "adapter": {"lora": LoraConfig(r=4)},
    "merged": {"lora": LoraConfig(r=4, merge_on_save=True)},
    "merged tied": {"tied": True, "lora": LoraConfig(r=4, merge_on_save=True)},
    "dora": {"lora": LoraConfig(r=4, dora=True)},
    "value model": {"alg": {"name": "ppo"}},
}


def save_kind(kind: str, tmp_path: Path) -> tuple[Path, str]:
    """Save a model of this kind; return folder and dtype."""
    how = dict(KINDS[kind])
    base = a_base(tmp_path / "base", tied=how.pop("tied", False), own_head=how.pop("own_head", False))
    trainer = trained(base, how.pop("lora", None), steps=0, **how)
    trainer.save_model(tmp_path / "out", "value" if kind == "value model" else "policy")
    return tmp_path / "out", how.get("dtype", "float32")


def lose_one(tensors: dict) -> str:
    tensors.pop(name := sorted(tensors)[-2])
    return name


def add_one(tensors: dict) -> str:
    tensors["experts.base_layer.weight"] = torch.zeros(2)
    return "experts.base_layer.weight"


def rename_one(tensors: dict) -> str:
    name = sorted(tensors)[-2]
    tensors[f"base.{name}"] = tensors.pop(name)
    return name


def turn_one(tensors: dict) -> str:
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2 and len({*tensors[n].shape}) == 2)
    tensors[name] = tensors[name].T.contiguous()
    return name


def widen_one(tensors: dict) -> str:
    tensors[name := sorted(tensors)[0]] = tensors[sorted(tensors)[0]].double()
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_save_is_read_back(kind, tmp_path):
    folder, dtype = save_kind(kind, tmp_path)
    [file] = folder.glob("*.safetensors")
    kept = file.read_bytes()
    check_saved(folder, dtype=dtype)
    for damage in (lose_one, add_one, rename_one, turn_one, widen_one):
        names: list[str] = []
        rewrite(folder, lambda tensors, damage=damage, names=names: names.append(damage(tensors)))
        with pytest.raises(SavedModelWrong) as told:
            check_saved(folder, dtype=dtype)
        assert names[0] in str(told.value) and str(folder) in str(told.value), damage.__name__
        file.write_bytes(kept)
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    with pytest.raises(SavedModelWrong, match=f"has dtype {dtype}, and {other} is expected"):
        check_saved(folder, dtype=other)


def test_a_tie_that_the_files_do_not_have_is_named(tmp_path):
    folder, dtype = save_kind("own head", tmp_path)
    check_saved(folder, dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    edit(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(SavedModelWrong, match=r"lm_head\.weight has values of its own, and config\.json ties it"):
        check_saved(folder, dtype=dtype)
    # and the reverse: a tied model whose config says that its head is its own
    folder, dtype = save_kind("tied", tmp_path / "tied")
    edit(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(SavedModelWrong, match=r"its files lack lm_head\.weight"):
        check_saved(folder, dtype=dtype)


def test_a_model_in_several_files_is_read_back(tmp_path):
    model = LlamaForCausalLM.from_pretrained(a_base(tmp_path / "base"))
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    assert check_saved(tmp_path / "out", dtype="float32") == len(model.state_dict())
    index = tmp_path / "out" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name = sorted(listed["weight_map"])[0]
    listed["weight_map"][name] = sorted({*listed["weight_map"].values()} - {listed["weight_map"][name]})[0]
    index.write_text(json.dumps(listed))
    with pytest.raises(SavedModelWrong, match=name):
        check_saved(tmp_path / "out", dtype="float32")


def test_a_folder_that_another_machine_wrote_is_no_saved_model(tmp_path):
    with pytest.raises(SavedModelWrong, match="every machine of the run shares"):
        check_saved(tmp_path, dtype="float32")


@pytest.mark.slow
def test_saved_models_give_the_same_logp_in_a_fresh_process(tmp_path):
    wanted: dict[str, torch.Tensor] = {}
    for kind in sorted(KINDS.keys() - {"value model"}):
        how = dict(KINDS[kind])
        base = a_base(tmp_path / kind / "base", tied=how.pop("tied", False), own_head=how.pop("own_head", False))
        trainer = trained(base, how.pop("lora", None), steps=2, **how)
        trainer.save_model(tmp_path / kind / "out")
        # computed in float32, here from weights that may be rounded to bfloat16
        wanted[kind] = logp_of(trainer.model.float())
    read = read_in_a_fresh_process(*(tmp_path / kind / "out" for kind in wanted))
    for (kind, ours), theirs in zip(wanted.items(), read, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0, msg=lambda said, kind=kind: f"{kind}: {said}")
