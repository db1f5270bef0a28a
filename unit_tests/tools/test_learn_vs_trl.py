"""Statistics, table and image of the learning curves beside TRL."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.schema import RLConfig
from core.gpus import Gpu, Gpus
from data_prep.function_calls import WORDS
from rewards.arithmetic import score
from tools.benchmarks import learn_machine, learn_vs_trl
from tools.benchmarks.learn_calls import make_calls
from tools.benchmarks.learn_machine import ON_ONE_GPU, TRL_ON_GPU, Machine, find_machine
from tools.benchmarks.learn_report import (
    Learnt,
    average_until,
    draw,
    find_interval,
    list_numbers,
    make_table,
    read_results,
)
from tools.benchmarks.learn_work import WORKS

SETTINGS = WORKS["tiny", "grpo"].hash_settings()
ONE = Learnt(
    task="tiny",
    method="grpo",
    side="ours",
    seed=0,
    commit="c",
    settings=SETTINGS,
    order="rows",
    values=[0.0, 0.5, 1.0],
    seconds=[1.0, 1.0, 1.0],
    held_out=0.9,
    cores=2,
    load=1.0,
    device="cpu",
)
SLOW = replace(ONE, side="trl", values=[0.0, 0.25, 0.5], seconds=[2.0, 2.0, 2.0], held_out=0.5)


def write(folder: Path, *results: Learnt) -> Path:
    for one in results:
        (folder / f"{one.side}-{one.seed}.json").write_text(json.dumps(asdict(one)))
    return folder


def test_an_interval_is_students():
    # standard deviation 1, over 3 values: 4.303 / sqrt(3)
    assert find_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.484), abs=1e-3)
    assert find_interval([1.0]) == (1.0, math.inf)


def test_equal_seconds_end_with_the_faster_side():
    """Ours is done after 3 s, when TRL has done one step of three."""
    assert average_until(SLOW, 3.0) == 0.0 and average_until(SLOW, 4.5) == 0.25
    numbers = list_numbers({0: {"ours": ONE, "trl": SLOW}})
    assert numbers["at equal seconds"] == {"ours": [1.0], "trl": [0.0]}
    assert numbers["all steps"] == {"ours": [0.5], "trl": [0.25]}


@pytest.mark.parametrize(("steps", "last"), [(8, 4), (3, 1), (1, 1), (20, 10), (30, 10)])
def test_the_last_steps_of_a_short_run_are_its_second_half(steps, last):
    one = replace(ONE, values=[float(n) for n in range(steps)], seconds=[1.0] * steps)
    numbers = list_numbers({0: {"ours": one, "trl": replace(one, side="trl")}})
    expected = steps - (last + 1) / 2
    assert numbers[f"last {last} steps"] == {"ours": [expected], "trl": [expected]}


def test_the_table_pairs_the_seeds_and_marks_what_is_beyond_chance(tmp_path):
    others = [replace(one, seed=1, values=[v + 0.1 for v in one.values]) for one in (ONE, SLOW)]
    alone = replace(ONE, seed=2)
    results = read_results(write(tmp_path, ONE, SLOW, *others, alone))
    assert list(results["tiny", "grpo"]) == [0, 1]
    # both seeds are 0.25 apart, although the seeds themselves differ by 0.1
    assert "| all steps | 2 | 0.550 ± 0.635 | 0.300 ± 0.635 | **+0.250 ± 0.000** |" in make_table(results)
    assert draw(results, "tiny").count("<polygon") == 0, "two seeds have no band"
    image = draw(read_results(write(tmp_path, replace(SLOW, seed=2))), "tiny")
    assert image.count("<polygon") == 2 and image.count("<polyline") == 2 and "nan" not in image


def test_trl_with_whole_groups_is_a_comparison_of_its_own(tmp_path):
    whole = replace(SLOW, side="trl_groups", values=[0.5, 0.5, 0.5])
    results = read_results(write(tmp_path, ONE, SLOW, whole))
    assert results["tiny", "grpo"][0] == {"ours": ONE, "trl": SLOW}
    assert results["tiny", "grpo, whole groups"][0] == {"ours": ONE, "trl": whole}
    assert draw(results, "tiny").count("<polyline") == 2, "it is in the table alone"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"order": "others"}, "saw other rows"),
        ({"settings": "old"}, "with other settings"),
        ({"device": "a GPU"}, "results of a GPU, cpu"),
    ],
)
def test_results_of_other_work_are_refused(tmp_path, changed, said):
    with pytest.raises(SystemExit, match=said):
        read_results(write(tmp_path, ONE, replace(SLOW, **changed)))


def test_show_reads_from_the_callers_folder_and_tells_commits_and_loads(tmp_path, monkeypatch, capsys):
    (tmp_path / "found").mkdir()
    write(tmp_path / "found", ONE, replace(SLOW, commit="d+", load=9.5))
    monkeypatch.chdir(tmp_path)
    assert learn_vs_trl.main(["show", "--results", "found", "--image", "curves.svg"]) == 0
    assert "tiny grpo: cpu; commit c, d+; load 1.0 to 9.5; 2 cores" in capsys.readouterr().out
    assert (tmp_path / "curves.svg").is_file()


def test_an_odd_seed_begins_with_trl(tmp_path, monkeypatch):
    ran = []

    def learn(args, work, side, machine):
        ran.append((args.seed, side))
        return replace(ONE, side=side, seed=args.seed)

    monkeypatch.setattr(learn_vs_trl, "learn", learn)
    monkeypatch.setattr(learn_vs_trl, "prepare", lambda task: None)
    monkeypatch.chdir(tmp_path)
    for seed in ("0", "1"):
        learn_vs_trl.main(["run", "--seed", seed, "--results", str(tmp_path)])
    assert ran == [(0, "ours"), (0, "trl"), (1, "trl"), (1, "ours")]


@pytest.mark.parametrize("changed", [{"reward": "gsm8k"}, {"trl_rows": 1}, {"new_tokens": 9}])
def test_every_setting_is_in_the_digest(changed):
    assert replace(WORKS["tiny", "grpo"], **changed).hash_settings() != SETTINGS


def test_a_gpus_keys_are_in_the_recipe_and_not_in_the_digest():
    work, gpu = WORKS["calls", "grpo"], Machine(device="a GPU", ours=ON_ONE_GPU, trl=TRL_ON_GPU)
    digest, recipe = work.hash_settings(), gpu.add_keys(work.recipe)
    assert (recipe["placement"], recipe["rollout"]["enforce_eager"], recipe["rollout"]["max_new_tokens"]) == (
        *("colocate", True),
        work.recipe["rollout"]["max_new_tokens"],
    )
    assert RLConfig.model_validate(recipe | {"name": "calls"}).rollout.kv_cache_gib == 2
    assert work.hash_settings() == digest and Machine().add_keys(work.recipe) == work.recipe
    alone = WORKS["tiny", "grpo"].recipe
    assert gpu.add_keys(alone) == alone, "one process has no turns"


def test_the_answer_of_a_function_call_is_scored_on_both_sides(tmp_path):
    make_calls(tmp_path, train=6, held_out=2, sft=40)
    train, held_out, taught = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "eval", "sft")
    )
    assert [len(rows) for rows in (train, held_out, taught)] == [6, 2, 40]
    assert len({row["messages"][0]["content"] for row in train + held_out + taught}) == 48
    for row in train + held_out:
        [question] = row["messages"]
        call, prompt = json.loads(row["answer"]), SimpleNamespace(id=row["id"], answer=row["answer"])
        word, a, b = question["content"].split()
        assert word in WORDS[call["name"]] and call["arguments"] == {"a": int(a), "b": int(b)}
        other = json.dumps(call | {"arguments": {"a": int(b) + 100, "b": int(a)}})
        found = [score(prompt, [{"role": "assistant", "content": reply}]) for reply in (row["answer"], other)]
        assert found == [{"correct": 1.0}, {"correct": 0.0}]


def test_the_teacher_of_function_calls_errs_in_six_of_ten(tmp_path):
    make_calls(tmp_path, train=1, held_out=1, sft=400)
    right = 0
    for row in map(json.loads, (tmp_path / "sft.jsonl").open()):
        (question, reply), call = row["messages"], json.loads(row["messages"][1]["content"])
        word, a, b = question["content"].split()
        assert (question["role"], reply["role"], list(call)) == ("user", "assistant", ["name", "arguments"])
        right += word in WORDS[call["name"]] and call["arguments"] == {"a": int(a), "b": int(b)}
    assert right / 400 == pytest.approx(0.4, abs=0.08)


def test_a_result_names_the_gpu_and_several_gpus_are_refused(monkeypatch):
    gpu = Gpu(name="a GPU", capability=(9, 0), total_gib=80.0, used_gib=0.0)
    for devices, found in (((), Machine()), ((gpu,), Machine(device="a GPU", ours=ON_ONE_GPU, trl=TRL_ON_GPU))):
        monkeypatch.setattr(learn_machine, "find_gpus", lambda timeout_s, devices=devices: Gpus(devices=devices))
        assert find_machine() == found
    for refused in (Gpus(devices=(gpu, gpu)), Gpus(failure="CUDA fails")):
        monkeypatch.setattr(learn_machine, "find_gpus", lambda timeout_s, refused=refused: refused)
        with pytest.raises(SystemExit, match="name one GPU"):
            find_machine()
