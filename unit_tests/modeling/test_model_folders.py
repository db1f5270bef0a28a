"""What is written into a saved model's files, and what is said of a folder that is not a model: whole sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from core.errors import UserError
from modeling.hf_config import (
    check_model_folder,
    choose_class,
    is_text_use,
    max_positions,
    meta_model,
    needs_images,
)
from modeling.layout_forecast import build_small
from modeling.load import check_weights, count_labels, load_model
from modeling.model_files import explain_gap, find_model_file, missing_in_index, read_headers
from modeling.saved_model import SavedModelWrong, check_saved, correct_generation_config, write_stop_tokens

TINY: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


def write(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def save_tiny(folder: Path, **more: Any) -> str:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY | more), dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "generation", "stops", "written"),
    [
        # what is there already stays as it is
        ({"eos_token_id": 7}, {"eos_token_id": [7, 8]}, [8], None),
        ({"eos_token_id": [3, 7]}, {"eos_token_id": 8}, [8], None),
        ({"eos_token_id": 7}, {"eos_token_id": 7}, [7, 9], ({"eos_token_id": 7}, {"eos_token_id": [7, 9]})),
        ({"eos_token_id": 5, "a": 1}, {}, [9], ({"eos_token_id": 7, "a": 1}, {"eos_token_id": 9})),
        ({"eos_token_id": None}, {"eos_token_id": [9]}, [7, 9], ({"eos_token_id": 7}, {"eos_token_id": [7, 9]})),
        # a vision-language model may have it in the part of its text, or beside it
        (
            {"text_config": {"eos_token_id": 1}},
            {"eos_token_id": 7},
            [7],
            ({"text_config": {"eos_token_id": 7}}, {"eos_token_id": 7}),
        ),
        (
            {"text_config": {"eos_token_id": 1}, "eos_token_id": 2},
            {"eos_token_id": 7},
            [7],
            ({"text_config": {"eos_token_id": 1}, "eos_token_id": 7}, {"eos_token_id": 7}),
        ),
    ],
)
def test_stop_tokens_of_a_run_are_written_where_they_are_missing(tmp_path, config, generation, stops, written):
    files = [write(tmp_path / "config.json", config), write(tmp_path / "generation_config.json", generation)]
    before = [file.read_bytes() for file in files]
    write_stop_tokens(tmp_path, eos=7, stops=stops)
    if written is None:
        assert [file.read_bytes() for file in files] == before
    else:
        assert tuple(json.loads(file.read_text()) for file in files) == written
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_stop_tokens(adapter, eos=7, stops=[7])
    assert not [*adapter.iterdir()]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, "(temperature=0.6, top_p=0.9): it is saved with do_sample=true"),
        (
            {"temperature": 0.0, "top_p": 0.9},
            "(temperature=0.0, top_p=0.9): it is saved without temperature and without top_p",
        ),
        ({"length_penalty": 2.0}, "(length_penalty=2.0): it is saved without length_penalty"),
        ({"pad_token_id": -1, "top_k": 7}, "(pad_token_id=-1, top_k=7): it is saved with do_sample=true and without "
         "pad_token_id"),
    ],
)  # fmt: skip
def test_what_is_corrected_is_told_with_its_values(given, told):
    config = GenerationConfig()
    for name, value in given.items():
        setattr(config, name, value)
    assert correct_generation_config(config) == f"generation_config.json of the base model is invalid {told}"
    assert correct_generation_config(config) is None


def refusal(call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(UserError) as refused:
        call(*args, **given)
    return str(refused.value)


def test_a_folder_without_a_model_is_told_in_one_sentence(tmp_path):
    run, checkpoint, adapter, empty = (tmp_path / name for name in ("run", "checkpoint", "adapter", "empty"))
    model = save_tiny(run / "model")
    file = write(checkpoint / "progress.json", {})
    write(adapter / "adapter_config.json", {})
    empty.mkdir()
    without = "has no config.json: it is"
    told = {
        checkpoint: f"{without} a checkpoint: `resume` continues its run, and main_eval.py evaluates it; else name a "
        "model folder",
        run: f"{without} a run folder: name {run / 'model'}",
        empty: f"{without} not a Hugging Face model folder",
        adapter: "is an adapter without its model: train it with model.lora.merge_on_save, which saves the whole model",
        file: "is a file: name the folder that holds the model's config.json",
    }
    gone = ("", "./none", "../none", "/none", "~/none", "a/b/c", "models/none", "runs/none", "data/none")
    told |= dict.fromkeys(gone, "does not exist: make the folder first, or name a model of the hub")
    for path, said in told.items():
        assert refusal(check_model_folder, str(path), key="judge.model") == f"judge.model={path} {said}"
    check_model_folder(model)
    (Path(model) / "config.json").write_text("{")
    assert refusal(check_model_folder, model, key="k").startswith(f"k: {model}/config.json cannot be read as a model")


class Parts(SimpleNamespace):
    """Config of a model with these parts."""

    def __init__(self, **parts: Any):
        super().__init__(**{"name_or_path": "there", "model_type": "unknown", **parts})


@pytest.mark.parametrize(
    ("config", "auto", "off"),
    [
        (Parts(), False, False),
        (Parts(vision_config=None, audio_config=None), False, False),
        (Parts(vision_config={}), True, True),
        (Parts(audio_config={}), True, True),
        (Parts(vision_config={}, model_type="qwen3_vl"), False, True),
        (Parts(vision_config=None, model_type="qwen3_vl"), False, False),
        (Parts(vision_config={}, audio_config={}, model_type="gemma4"), False, True),
    ],
)
def test_a_model_of_other_parts_is_used_for_text_where_they_are_unknown(config, auto, off):
    assert (is_text_use(config), is_text_use(config, "auto"), is_text_use(config, "off")) == (auto, auto, off)


def test_the_class_that_loads_a_model_is_that_of_its_parts(tmp_path):
    text, known, other = (AutoConfig.for_model(name) for name in ("llama", "qwen2_vl", "mistral3"))
    assert choose_class(text, path="p") is AutoModelForCausalLM
    assert choose_class(known, path="p") is AutoModelForImageTextToText
    assert choose_class(other, path="p") is AutoModelForImageTextToText
    assert refusal(choose_class, Parts(vision_config={}), path="p", key="k") == (
        "k=p is a unknown model, and transformers has no class that loads its language part: take another model"
    )
    known.save_pretrained(tmp_path / "known")
    other.save_pretrained(tmp_path / "other")
    paths = [str(tmp_path / "known"), str(tmp_path / "other")]
    assert [needs_images(path) for path in paths] == [True, False]
    assert [needs_images(path, images="off") for path in paths] == [False, False]


def test_the_longest_sequence_is_that_of_the_config(tmp_path):
    AutoConfig.for_model("llama", max_position_embeddings=77).save_pretrained(tmp_path / "a")
    AutoConfig.for_model("mamba").save_pretrained(tmp_path / "b")
    assert [max_positions(str(tmp_path / name)) for name in "ab"] == [77, None]


def test_a_config_of_which_no_model_is_made_is_told_by_key_and_path(tmp_path):
    path = str(tmp_path)
    AutoConfig.for_model("clip").save_pretrained(path)
    callers: list[Callable[..., Any]] = [
        meta_model,
        check_weights,
        partial(build_small, attention="auto"),
        partial(load_model, dtype="float32", attention="auto"),
    ]
    for call in callers:
        assert refusal(call, path, key="k") == (
            f"k={path} is a clip model, and transformers has no class that loads its language part: take another model"
        )
    AutoConfig.for_model("llama", **TINY, hidden_act="nothing").save_pretrained(path)
    assert refusal(meta_model, path, key="k") == (
        f"k={path}: its config.json makes no causal language model (KeyError: 'nothing'): take another model, or "
        "repair it"
    )
    (tmp_path / "config.json").write_text("{")
    for call in callers:
        assert refusal(call, path, key="k").startswith(f"k: {path}/config.json cannot be read as a model config (")


def change_tensors(folder: Path, change: Any) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = {name: torch.zeros(header.shape) for name, header in read_headers(folder).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj.weight"
MISFITS = {
    "shape": (
        lambda t: t.update({Q: torch.zeros(3, 4)}),
        f"{Q} has shape [3, 4] in its files, and [8, 8] by its config.json",
    ),
    "two shapes and one more": (
        lambda t: t.update({Q: torch.zeros(3, 4), "lm_head.weight": torch.zeros(1), "more": torch.zeros(1)}),
        "lm_head.weight has shape [1] in its files, and [16, 8] by its config.json (2 tensors more do not fit)",
    ),
    "missing": (lambda t: t.pop(Q), f"its files lack {Q}"),
    "another name": (
        lambda t: t.update({"a.q": t.pop(Q)}),
        f"its files lack {Q} and hold a.q, which no such model has (1 tensors more do not fit)",
    ),
    "unexpected": (lambda t: t.update(b=torch.zeros(1)), "its files hold b, which no model of its config.json has"),
    "three": (
        lambda t: t.update(b=torch.zeros(1), a=torch.zeros(1), c=torch.zeros(1)),
        "its files hold a, which no model of its config.json has (2 tensors more do not fit)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit_the_config_are_told(tmp_path, case):
    change, told = MISFITS[case]
    path = save_tiny(tmp_path)
    check_weights(path)
    assert check_saved(tmp_path, dtype="float32") == 12
    change_tensors(tmp_path, change)
    whole = f"{told}: save model and config.json together again"
    assert refusal(check_weights, path, key="k") == f"k={path}: {whole}"
    with pytest.raises(SavedModelWrong) as wrong:
        check_saved(tmp_path, dtype="float32")
    assert str(wrong.value) == (
        f"the model was saved wrongly: saved={path}: {whole}; what was written is left in {tmp_path}"
    )
    loading = partial(load_model, path, dtype="float32", attention="eager")
    assert refusal(loading) == f"model.path={path}: {whole}"


def test_a_saved_dtype_is_the_recipes(tmp_path):
    save_tiny(tmp_path)
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(SavedModelWrong) as wrong:
            check_saved(tmp_path, dtype=dtype)
        first = min(read_headers(tmp_path))
        assert str(wrong.value) == (
            f"the model was saved wrongly: {first} has dtype float32, and {dtype} is expected; what was written is "
            f"left in {tmp_path}"
        )
    with pytest.raises(SavedModelWrong) as wrong:
        check_saved(tmp_path / "none", dtype="float32")
    assert str(wrong.value) == (
        f"{tmp_path / 'none'} has no tensors where this process reads it: run_dir and save_to must be folders that "
        "every machine of the run shares"
    )


def test_files_of_a_model_are_found_and_their_index_is_compared(tmp_path):
    path = save_tiny(tmp_path)
    assert find_model_file(path, "config.json") == tmp_path / "config.json"
    assert find_model_file(path, "none.json") is None and find_model_file("/not/a//name", "config.json") is None
    headers = read_headers(tmp_path)
    assert missing_in_index(tmp_path) is None
    index = {name: header.file.name for name, header in headers.items()}
    for change, found in (({}, None), ({"z": "model.safetensors"}, "z"), ({min(index): "other"}, min(index))):
        write(tmp_path / "model.safetensors.index.json", {"weight_map": index | change})
        assert missing_in_index(tmp_path) == found
    write(tmp_path / "model.safetensors.index.json", {"weight_map": {k: v for k, v in index.items() if k != Q}})
    assert missing_in_index(tmp_path) == Q
    save_file({"a": torch.zeros(2, 3, dtype=torch.int64), "b": torch.zeros(4).bfloat16()}, tmp_path / "x.safetensors")
    more = read_headers(tmp_path)
    assert (more["a"].shape, more["a"].dtype, more["b"].dtype) == ((2, 3), None, torch.bfloat16)
    assert more["a"].file == tmp_path / "x.safetensors" and len(more) == len(headers) + 2


def test_what_may_part_engine_and_trainer_is_told(tmp_path):
    tied = "the head is tied to the embedding and sent once, so the engine must use one tensor for both"
    own = (
        "the head is tied in the config and not in the file, which holds lm_head.weight with values of its own: set "
        "tie_word_embeddings to false in config.json of {}"
    )
    experts = (
        "the model is a mixture of experts, and where two experts are nearly equal, engine and trainer may choose "
        "different ones: compare with model.dtype=float32, and raise weight_sync.probe_tolerance if that agrees"
    )
    assert explain_gap(save_tiny(tmp_path / "plain")) == ""
    assert explain_gap(save_tiny(tmp_path / "tied", tie_word_embeddings=True)) == tied
    path = save_tiny(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    write(tmp_path / "own" / "config.json", config | {"tie_word_embeddings": True})
    assert explain_gap(path) == own.format(path)
    weights = load_file(tmp_path / "own" / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    for head, told in ((table, tied), (table.bfloat16(), own.format(path)), (table[:-1], own.format(path))):
        save_file(weights | {"lm_head.weight": head.clone()}, tmp_path / "own" / "model.safetensors")
        assert explain_gap(path) == told
    for number, told in ((1, ""), (2, experts)):
        write(tmp_path / "own" / "config.json", config | {"n_routed_experts": number})
        assert explain_gap(path) == told
    write(tmp_path / "own" / "config.json", config | {"num_experts": 2, "tie_word_embeddings": True})
    assert explain_gap(path) == f"{own.format(path)}; {experts}"


def test_labels_are_those_of_a_saved_classifier(tmp_path):
    config = json.loads(Path(save_tiny(tmp_path), "config.json").read_text())
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"num_labels": 3}, 0),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, 3),
        ({"architectures": ["X", "MySequenceClassification"], "num_labels": 1}, 1),
        ({"architectures": None}, 0),
    ]
    for changes, number in cases:
        write(tmp_path / "config.json", config | changes)
        assert count_labels(str(tmp_path)) == number
