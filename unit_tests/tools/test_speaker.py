"""A run's model or adapter writes: with its chat template, its system prompt, and its ends of replies."""

from __future__ import annotations

import asyncio
import io
import json
import shutil

import pytest
import torch

import main_sl
from core.errors import UserError
from tools import chat, generate
from tools.speaker import Speaker, find_model
from unit_tests.helpers.examples import run_here

ASK = [{"role": "user", "content": "1+1="}]


def trained(recipe, tmp_path, name: str, changes: dict):
    """Folder of a run of one step."""
    where = {"run_dir": str(tmp_path / name), "steps": 1, "trainer.lr": 1e-2}
    code, err = run_here(main_sl, "--config", recipe(where | changes, kind="sl"))
    assert code == 0, err
    [folder] = (tmp_path / name).iterdir()
    return folder


def written_by(name: str, **settings) -> list[str]:
    return asyncio.run(Speaker(find_model(name), max_new_tokens=12, **settings).reply(ASK, [0, 1, 2, 3]))


def test_a_run_and_its_model_folder_write_the_same(recipe, tmp_path, tiny_path):
    folder = trained(recipe, tmp_path, "whole", {"data.system_prompt": "be brief", "checkpoint.every": 1})
    by_run = written_by(str(folder))
    assert by_run == written_by(str(folder / "model"))
    assert by_run == written_by(str(folder / "checkpoints" / "step_00001")), "system prompt included"
    assert by_run != written_by(str(folder), system="be long"), "the run's system prompt is used"
    copy = shutil.copytree(folder / "model", tmp_path / "copy")
    (copy / "feynrl.json").unlink()
    assert written_by(str(copy), system="be brief") == by_run
    assert by_run != written_by(tiny_path, system="be brief"), "the model has learnt"


def test_an_adapter_is_merged_into_its_model(recipe, tmp_path, tiny_path):
    """Two runs that are the same: one saves its adapter alone, the other the whole model with it merged in."""
    merged = trained(recipe, tmp_path, "merged", {"model.lora": {"r": 4, "merge_on_save": True}})
    alone = trained(recipe, tmp_path, "alone", {"model.lora": {"r": 4}, "checkpoint.every": 1})
    assert not (alone / "model" / "config.json").exists()
    checkpoint = str(alone / "checkpoints" / "last")
    speakers = [Speaker(find_model(name)) for name in (str(merged), str(alone), checkpoint, tiny_path)]
    ids = torch.tensor([speakers[0].tokenizer.render(ASK)])
    with torch.no_grad():
        whole, apart, saved, before = (speaker.engine.model(ids).logits for speaker in speakers)
    torch.testing.assert_close(whole, apart, atol=1e-4, rtol=1e-4)
    assert torch.equal(whole, saved), "a checkpoint is the model that the run would have saved"
    assert (apart - before).abs().max() > 1e-2


def test_stops_are_those_of_the_run(recipe, tmp_path):
    folder = trained(recipe, tmp_path, "stops", {})
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "rollout: {stop: [" + ", ".join(f"'{c}'" for c in "0123456789") + "]}\n")
    replies = asyncio.run(Speaker(find_model(str(folder)), max_new_tokens=64).reply(ASK, list(range(8))))
    assert all(not any(c.isdigit() for c in reply[:-1]) for reply in replies)
    assert any(reply[-1:].isdigit() for reply in replies)


def test_the_programs_answer(tiny_path, capsys, monkeypatch):
    generate.main([tiny_path, "--prompt", "1+1=", "--prompt", "2+2=", "--n", "2", "--max-new-tokens", "4", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["seed"]) for row in rows] == [(p, s) for p in ("1+1=", "2+2=") for s in (0, 1)]
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n/new\n1+1=\n" + "2" * 300 + "\n1+1=\n/quit\nmore\n"))
    chat.main([tiny_path, "--max-new-tokens", "4", "--temperature", "0.01"])
    said = capsys.readouterr()
    first, again, last = said.out.splitlines()
    assert first == again == last, "a new conversation begins as the first did"
    assert "a new conversation begins" in said.err


def test_what_is_no_model_is_refused(tmp_path, recipe):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a model"):
        find_model(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="without model/"):
        find_model(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no such folder"):
        find_model("/nowhere/model")
    for bad in ("0.001", "-1"):
        with pytest.raises(UserError, match=r"--temperature=.* must be 0, which is greedy, or from"):
            generate.main([str(tmp_path), "--prompt", "a", "--temperature", bad])
    with pytest.raises(UserError, match="--temperature=0 makes the 2 replies of a prompt equal"):
        generate.main([str(tmp_path), "--prompt", "a", "--temperature", "0", "--n", "2"])


def test_at_temperature_0_the_most_probable_tokens_are_written(tiny_path, capsys):
    generate.main([tiny_path, "--prompt", "1+1=", "--temperature", "0", "--seed", "7", "--max-new-tokens", "6"])
    said = capsys.readouterr().out.removesuffix("\n")
    speaker = Speaker(find_model(tiny_path))
    ids = speaker.tokenizer.render(ASK)
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 6 and (len(ids) == start or ids[-1] not in speaker.tokenizer.stop_token_ids):
            ids.append(int(speaker.engine.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert said == speaker.tokenizer.decode(ids[start:]) != ""
