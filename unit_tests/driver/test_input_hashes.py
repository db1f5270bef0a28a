"""What the hashes of a run's inputs see: files of models, template and tokenizer, and settings of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import RLConfig, SLConfig
from core.cluster.workers import Local
from core.errors import UserError
from core.types.samples import Prompt
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import load_prompts
from driver.checkpoint import write_checkpoint
from driver.load_recipe import load_recipe
from driver.model_hash import hash_folders, hash_model, hash_models
from driver.resume import bitwise_only_changes, check_settings, collect_settings, find_checkpoint_to_resume
from driver.run_inputs import hash_inputs, hash_row, hash_rows, hash_template
from unit_tests.helpers.checkpoints import Writer, stand
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.runs import file_of
from unit_tests.helpers.sentences import tell

Recipe = Callable[..., str]


def test_the_hash_of_a_model_sees_64_places_of_its_weights(tmp_path: Path):
    """Of a file of 1000 pages of 4096 bytes, the second place begins at 999 * 4096 // 63 = 64,950."""
    weights = bytearray(1000 * 4096)
    path = tmp_path / "model.safetensors"

    def hash_with(changed: int | None = None) -> str:
        if changed is not None:
            weights[changed] = 1
        path.write_bytes(weights)
        if changed is not None:
            weights[changed] = 0
        return hash_model(tmp_path)

    same = hash_with()
    seen = {hash_with(at) for at in (0, 4095, 64_950, 64_950 + 4095, 999 * 4096, 1000 * 4096 - 1)}
    assert len(seen | {same}) == 7
    unseen = (4096, 33_000, 64_949, 64_950 + 4096, 999 * 4096 - 1)
    assert {hash_with(at) for at in unseen} == {same}, "all of it would take minutes"


def test_the_hash_of_a_model_sees_configurations_code_and_names_of_weights(tmp_path: Path):
    names = ("config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json")
    names += ("processor_config.json", "video_preprocessor_config.json", "own.py", "a.safetensors", "a.bin")

    def hash_of(**changed: str) -> str:
        files = {name: name for name in (*names, "README.md", "tokenizer.json")} | changed
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return hash_model(tmp_path)

    same = hash_of()
    found = [hash_of(**{name: "other"}) for name in names]
    assert len({same, *found}) == 1 + len(names)
    assert hash_of(**{"README.md": "other", "tokenizer.json": "other"}) == same
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    renamed = hash_model(tmp_path)
    (tmp_path / "b.bin").write_text("longer than before")
    (tmp_path / "c.safetensors").mkdir()  # no file of weights
    assert len({same, renamed, hash_model(tmp_path)}) == 3


def test_only_models_in_folders_are_hashed_each_under_its_key(recipe: Recipe, tiny_path: str):
    assert hash_folders({"a": tiny_path, "b": "owner/model", "c": None, "d": "x" * 5000}) == {
        "the files of a": hash_model(Path(tiny_path))
    }
    loaded = load_recipe(RLConfig, recipe({"alg": {"name": "opd", "teacher": tiny_path}}), [])

    def keys(**changes: Any) -> list[str]:
        return [*hash_models(loaded.cfg.model_copy(update=changes), loaded.alg)]

    usual = ["the files of model.path", f"the files of {tiny_path}, which alg names"]
    judge = SimpleNamespace(is_policy=False, model=tiny_path)
    assert keys() == usual and keys(judge=judge) == [*usual, "the files of judge.model"]
    assert keys(judge=SimpleNamespace(is_policy=True, model=tiny_path)) == usual
    plays = loaded.cfg.rollout.model_copy(update={"opponent": tiny_path})
    assert keys(rollout=plays) == [*usual, "the files of rollout.opponent"]
    rows = load_recipe(SLConfig, recipe(kind="sl"), [])
    assert [*hash_models(rows.cfg, rows.alg)] == ["the files of model.path"]


def test_a_tokenizer_that_writes_other_tokens_is_another_input(tiny_path: str):
    template = "the chat template of model.path"
    written = "what the chat template and the tokenizer of model.path write"
    same, again, other = (ChatTokenizer(tiny_path, "chat") for _ in range(3))
    plain = ChatTokenizer(tiny_path, "plain")
    assert hash_template(same) == hash_template(again) and hash_template(same).keys() == {template, written}
    other.hf.add_tokens(["Was"])
    assert hash_template(other)[template] == hash_template(same)[template]
    assert hash_template(other)[written] != hash_template(same)[written]
    assert hash_template(plain)[template] != hash_template(same)[template]


def test_a_tokenizer_that_writes_a_turn_in_other_tokens_is_noticed(tiny_path: str):
    """Whoever said it: the user, the system, the policy or a tool."""
    found: set[str] = set()
    for words in ("", "Was", "brief", "A?", "B.", "C?", "Look", "letter"):
        tokenizer = ChatTokenizer(tiny_path, "chat")
        tokenizer.hf.add_tokens([words] if words else [])
        found.add(hash_template(tokenizer)["what the chat template and the tokenizer of model.path write"])
    assert len(found) == 8


TOOLS = (
    "{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}{% endfor %}"
)


def test_a_tokenizer_that_writes_a_tool_or_a_call_otherwise_is_noticed(tiny_path: str):
    """Also what few templates write: which parameters are required, and the id of a call."""
    found: set[str] = set()
    for words in ("", "Look a word up", '["word"]', "call00000"):
        tokenizer = ChatTokenizer(tiny_path, "chat", chat_template=TOOLS)
        tokenizer.hf.add_tokens([words] if words else [])
        found.add(hash_template(tokenizer)["what the chat template and the tokenizer of model.path write"])
    assert len(found) == 4


def test_a_checkpoint_is_resumed_by_its_own_program_and_recipe(recipe: Recipe, tmp_path: Path):
    def write(name: str, settings: dict[str, Any], steps_done: int = 1) -> str:
        state = stand(steps_done)
        state.recipe.update(settings)
        asyncio.run(write_checkpoint(tmp_path / name / "checkpoints", Local(Writer()), state))  # type: ignore[arg-type]
        return str(tmp_path / name)

    def resume(folder: str, **changes: Any) -> Any:
        loaded = load_recipe(RLConfig, recipe({"resume": folder, **changes}), [])
        return find_checkpoint_to_resume(loaded, collect_settings(loaded, {}, {}))

    loaded = load_recipe(RLConfig, recipe(), [])
    settings = collect_settings(loaded, {}, {})
    assert find_checkpoint_to_resume(loaded, settings) is None
    rl = write("rl", settings)
    assert resume(rl).state.steps_done == 1
    rows = load_recipe(SLConfig, recipe(kind="sl"), [])
    sl = write("sl", collect_settings(rows, {}, {}))
    said = "is a run of the other program (main_rl.py or main_sl.py): resume it there"
    assert tell(lambda: resume(sl)) == f"resume={sl} {said}"
    of_rows = load_recipe(SLConfig, recipe({"resume": rl}, kind="sl"), [])
    assert tell(lambda: find_checkpoint_to_resume(of_rows, collect_settings(of_rows, {}, {}))) == f"resume={rl} {said}"
    assert tell(lambda: resume(rl, seed=1)) == (
        "seed is 1 and was 0 when the checkpoint was made, and the training depends on it: set it back to resume, or "
        "leave resume out to start again"
    )
    files = write("files", settings | {"sha256": {**settings["sha256"], "the rubric": "0"}})
    assert tell(lambda: resume(files)) == (
        f"resume={files}: the rubric changed since the checkpoint was made, and the training depends on it: restore it "
        "to resume, or leave resume out to start again"
    )
    ours = write("ours", settings | {"sha256": {**settings["sha256"], "the file of alg": "0"}})
    assert resume(ours).state.steps_done == 1, "FeynRL's own file may change"
    over = write("over", settings, steps_done=2)
    assert tell(lambda: resume(over)) == f"steps=2, and resume={over} has done 2: nothing is left, raise steps"


FREE = {
    *("name", "run_dir", "save_to", "resume", "timeout_s", "device", "ray_address", "ship_code", "push_to"),
    *("checkpoint.every", "checkpoint.keep", "checkpoint.best", "checkpoint.best_mode", "on_failure", "max_resumes"),
    *("stop_when", "trackers", "display", "show_samples", "record_tokens", "data.max_invalid_fraction"),
    *("tracking.group", "tracking.tags", "tracking.notes", "tracking.samples_every", "tracking.samples"),
    *("tracking.mlflow_uri", "tracking.mlflow_experiment", "tracking.wandb_project", "tracking.wandb_entity"),
    *("tracking.wandb_mode", "tracking.prometheus_port", "tracking.prometheus_host", "model.lora.merge_on_save"),
    *("trainer.max_skipped_updates", "trainer.peak_tflops", "reward.workers", "reward.timeout_s"),
    *("reward.max_failed_fraction", "reward.max_concurrency", "reward.judge_budget.calls"),
    *("reward.judge_budget.tokens", "rollout.gateway", "rollout.restarts", "rollout.timeout_s", "rollout.sleep_mode"),
    *("profile.steps", "profile.trace", "profile.memory", "weight_sync.bucket_mib", "weight_sync.timeout_s"),
    *("weight_sync.probe_tolerance", "weight_sync.transport", "weight_sync.folder", "weight_sync.delta"),
    *("weight_sync.whole_every", "capture.every", "capture.on", "capture.kl_above", "capture.grad_norm_times"),
    *("capture.most", "capture.weights", "compare_losses", "placement"),
    # a constant learning rate does not depend on the number of steps
    "steps",
    # its contents are compared
    "alg.file",
}
"""Keys of a recipe that may change and move no bit."""
LAST_BITS = {
    *("trainer.micro_batch_tokens", "trainer.logits_mib", "trainer.gradient_checkpointing", "trainer.share_prefixes"),
    *("trainer.sequence_parallel", "trainer.offload", "trainer.compile", "rollout.num_engines"),
    *("rollout.tensor_parallel_size", "rollout.enforce_eager", "rollout.batch_invariant", "rollout.kv_cache_gib"),
    *("rollout.gpu_memory_utilization", "rollout.max_concurrency", "rollout.servers"),
    # an engine batches held-out prompts with others
    *("eval_every", "eval_samples", "eval_pass_reward", "eval_reward", "data.eval", "data.eval_rows"),
}


def test_a_resume_may_change_these_keys_and_no_other(recipe: Recipe):
    loaded = load_recipe(RLConfig, recipe({"model.lora": {}}), [])
    now = collect_settings(loaded, {}, {})["settings"]

    def is_refused(key: str, settings: dict[str, Any]) -> bool:
        try:
            check_settings(settings, settings | {key: "another value"})
        except UserError as error:
            why = "the learning rate" if key == "steps" else "the training"
            assert str(error) == (
                f"{key} is 'another value' and was {settings[key]!r} when the checkpoint was made, and {why} depends "
                "on it: set it back to resume, or leave resume out to start again"
            )
            return True
        return False

    assert {key for key in now if not is_refused(key, now)} == FREE | LAST_BITS
    assert {key for key in now if bitwise_only_changes(now, now | {key: "another value"})} == LAST_BITS
    assert is_refused("steps", now | {"trainer.lr_schedule": "linear"})
    sharded = now | {"trainer.strategy": "fsdp2"}
    assert is_refused("trainer.ranks", now) and not is_refused("trainer.ranks", sharded)
    assert bitwise_only_changes(sharded, sharded | {"trainer.ranks": 4}) == ["trainer.ranks"]
    # keys of sections that the recipe has not
    others = {"judge.num_engines": 1, "judge.tensor_parallel_size": 1, "judge.placement": None, "judge.model": "m"}
    others |= {"rollout.num_engines.max": 3, "stop_when.above": 1.0, "eval_reward.function": "a", "data.eval.path": "a"}
    others |= {"rollout.agent.address": ["a"], "rollout.gateway.port": 1}
    others |= {"alg.file": "a.py", "data.sampler.file": "a.py"}
    assert {key for key in others if is_refused(key, now | others)} == {"judge.model"}
    gone = {key: value for key, value in now.items() if key != "seed"}
    with pytest.raises(UserError, match=r"^seed is None and was 0 when the checkpoint was made"):
        check_settings(now, gone)
    rows = [{"path": "a.jsonl"}]
    check_settings(now | {"data.train": rows}, now | {"data.train": [{"form": "ours", "lazy": False, **rows[0]}]})


def test_rows_and_files_are_hashed_under_their_names(recipe: Recipe, sums: Path, tiny_path: str, tmp_path: Path):
    (tmp_path / "rubric.txt").write_text("be kind")
    reward: dict[str, Any] = {"reward.function": file_of(tmp_path / "pay.py", PAY)}
    reward |= {"reward.settings": {"rubric": str(tmp_path / "rubric.txt")}}
    template = ["the chat template of model.path", "what the chat template and the tokenizer of model.path write"]

    def hash_now(changes: dict[str, Any]) -> dict[str, str]:
        loaded = load_recipe(RLConfig, recipe(reward | changes), [])
        tokenizer = make_tokenizer(loaded.cfg.model, loaded.cfg.data)
        prompts = load_prompts(loaded.cfg.data, "train", tokenizer, seed=0)
        return hash_inputs(loaded, {"reward.function": None}, tokenizer, prompts)

    train, held_out = str(sums / "train.parquet"), str(sums / "eval.parquet")
    alone = hash_now({})
    assert [*alone] == [*template, "what the rows of data.train hold", "the file of reward.settings.rubric"]
    mixture = hash_now({"data.train": [{"path": train, "name": "a"}, {"path": held_out, "name": "b"}]})
    rows = [f"what the rows of data.train[{i}] hold" for i in range(2)]
    assert [*mixture] == [*template, *rows, "the file of reward.settings.rubric"]
    assert mixture[rows[0]] != mixture[rows[1]]
    (tmp_path / "rubric.txt").write_text("be strict")
    changed = hash_now({})
    assert [key for key in alone if alone[key] != changed[key]] == ["the file of reward.settings.rubric"]


PAY = "def score(prompt, messages, *, rubric):\n    return {'a': 1.0}\n"


def test_the_hash_of_a_row_sees_what_a_run_reads_of_it():
    def a_prompt(**changes: Any) -> Prompt:
        given = {"id": "a", "messages": [{"role": "user", "content": "1"}], "answer": "2", "extra": {"level": 1}}
        return Prompt(**given | changes)

    same, said = a_prompt(), [{"role": "assistant", "content": "2"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    changes = [{"messages": said}, {"answer": "3"}, {"extra": {}}, {"tools": [tool]}, {"demonstration": said}]
    found = [hash_row(a_prompt(**one)) for one in changes]
    assert len({hash_row(same), *found}) == 1 + len(changes) and hash_row(a_prompt(id="b")) == hash_row(same)
    assert hash_rows([same]) == hash_rows([a_prompt()]) != hash_rows([a_prompt(id="b")])
    assert len({hash_rows([]), hash_rows([same]), hash_rows([same, same])}) == 3
    first = sample_of([1, 2, 3], [False, True, True], prompt=same, reward=1.0)
    others = [replace(first, token_ids=first.token_ids[::-1]), replace(first, action_mask=~first.action_mask)]
    others += [replace(first, reward=0.0), replace(first, prompt=a_prompt(answer="3"))]
    assert len({hash_rows([[one]]) for one in (first, *others)}) == 5
