"""What a run reads besides its recipe is part of its checkpoint: a resume with a change is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import AutoConfig, AutoModelForSequenceClassification

import main_sl
from configs.data_schema import PromptDataConfig, RowDataConfig
from configs.eval_schema import EvalConfig
from configs.schema import RLConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError
from core.loading import FileSpec
from core.types.images import read_image
from core.types.samples import Prompt
from data_feeds.chat.template_args import check_template_args, make_tokenizer, pin_date
from data_feeds.feed import load_prompts
from driver.evaluation.suites.resume import collect_eval_settings, find_samples
from driver.evaluation.suites.setup import SETTINGS, load_eval_recipe, prepare_eval
from driver.imported_files import list_imported_files
from driver.load_recipe import load_recipe
from driver.model_hash import MODEL_FILES
from driver.resume import changed_files, collect_settings
from driver.run_inputs import hash_inputs, hash_probes, hash_rows
from driver.start.rollouts import build_engine, plan_rollouts
from rewards import reward_model
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.runs import ROOT, file_of, folder_of
from unit_tests.helpers.small_trained import rewrite

DATED = (
    "{{ '<|system|>' + strftime_now('%d %b %Y') }}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TALKS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(5)
]


def make_model(tiny_path: str, folder: Path, template: str) -> str:
    shutil.copytree(tiny_path, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.fixture
def dated(tiny_path, tmp_path) -> str:
    return make_model(tiny_path, tmp_path / "dated", DATED)


def test_the_date_of_a_template_is_that_of_the_start(dated):
    asked: Any = [{"role": "user", "content": "1"}]
    data = PromptDataConfig(train="x.jsonl")
    tokenizer = make_tokenizer(ModelConfig(path=dated), data)
    old = pin_date(tokenizer, data, "2020-02-03T04:05:06")
    assert old.template_date == "2020-02-03T04:05:06"
    assert "03 Feb 2020" in tokenizer.render_text(asked, reply_next=True)
    check_template_args(tokenizer, old)
    # another process of the run, and a later start that goes on
    for keys in (old, pin_date(make_tokenizer(ModelConfig(path=dated), old), old, None)):
        assert "03 Feb 2020" in make_tokenizer(ModelConfig(path=dated), keys).render_text(asked, reply_next=True)
    new = pin_date(make_tokenizer(ModelConfig(path=dated), data), data, None)
    assert new.template_date is not None and (datetime.now() - datetime.fromisoformat(new.template_date)).days == 0


def test_a_date_that_no_template_writes_is_neither_pinned_nor_taken(tiny_path, dated):
    data = PromptDataConfig(train="x.jsonl")
    assert pin_date(make_tokenizer(ModelConfig(path=tiny_path), data), data, "2020-02-03") is data
    with_date = PromptDataConfig(train="x.jsonl", template_date="2020-02-03")
    with pytest.raises(UserError, match=r"data\.template_date: the chat template of this model writes no date"):
        check_template_args(make_tokenizer(ModelConfig(path=tiny_path), with_date), with_date)
    for wrong in ("today", 20200203, True):
        with pytest.raises(ValueError, match="is no date: write one such as"):
            PromptDataConfig(train="x.jsonl", template_date=wrong)
    with pytest.raises(ValueError, match="template is plain, and template_date"):
        PromptDataConfig(train="x.jsonl", template="plain", template_date="2020-02-03")
    assert RowDataConfig(train="x.jsonl", template_date="2020-02-03").template_date == "2020-02-03T00:00:00"


def test_an_engine_writes_the_date_of_its_run(dated, recipe):
    changes = {"model.path": dated, "data.template_date": "2020-02-03"}
    plan = plan_rollouts(load_recipe(RLConfig, recipe(changes), []).cfg)
    _, tokenizer, _ = build_engine(plan, plan.engine)
    assert "03 Feb 2020" in tokenizer.render_text([{"role": "user", "content": "1"}], reply_next=True)


def test_a_reward_model_whose_template_writes_the_date_needs_it(dated):
    config = AutoConfig.from_pretrained(dated)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(dated)
    with pytest.raises(UserError, match=r"writes the date: set reward\.settings\.template_date"):
        reward_model.prepare(model=dated)
    asked, reply = [{"role": "user", "content": "1"}], [{"role": "assistant", "content": "2"}]
    given: Any = {"prompt": Prompt(id="a", messages=asked), "messages": reply, "model": dated}
    found = [
        asyncio.run(reward_model.score(**given, template_date=day))
        for day in ("2020-02-03", "2020-02-03", "2021-10-12")
    ]
    assert found[0] == found[1] != found[2]


def test_a_resume_notices_whatever_has_changed(dated, recipe, tmp_path, one_thread):
    from datasets import Dataset

    rows, mine = tmp_path / "rows", tmp_path / "mine"
    Dataset.from_list(TALKS).save_to_disk(rows)
    mine.mkdir()
    (mine / "loss.py").write_text((ROOT / "algs/sft.py").read_text() + "\n\nfrom unlikely_name.parts import SCALE\n")
    (mine / "unlikely_name").mkdir()
    (mine / "unlikely_name/__init__.py").write_text("")
    (mine / "unlikely_name/parts.py").write_text("SCALE = 1.0\n")
    changes = {"model.path": dated, "alg": {"file": str(mine / "loss.py")}, "data.train": str(rows)}
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(mine)
        path = recipe(changes | {"data.template_date": "2020-02-03"}, kind="sl")
        assert run_here(main_sl, "--config", path, "name=first", "checkpoint.every=1", "steps=1") == (0, "")
        path = recipe(changes, kind="sl")
        resume = f"resume={folder_of(tmp_path, 'first')}"
        assert run_here(main_sl, "--config", path, resume, "steps=2", "name=second") == (0, ""), "nothing has changed"
        config = yaml.safe_load((folder_of(tmp_path, "second") / "config.yaml").read_text())
        assert config["data"]["template_date"] == "2020-02-03T00:00:00", "that of the checkpoint"

        def refuse(words: str, *overrides: str) -> None:
            code, err = run_here(main_sl, "--config", path, resume, "steps=2", *overrides)
            assert code == 2 and words in err and len(err.splitlines()) == 1, err

        refuse("data.template_date is '2021-02-03T00:00:00' and was '2020", "data.template_date='2021-02-03'")
        (mine / "unlikely_name/parts.py").write_text("SCALE = 2.0\n")
        refuse("the file parts.py beside your code changed since")
        (mine / "unlikely_name/parts.py").write_text("SCALE = 1.0\n")
        (Path(dated) / "chat_template.jinja").write_text(DATED + "{# a comment #}")
        refuse("the chat template of model.path changed since")
        (Path(dated) / "chat_template.jinja").write_text(DATED)
        shutil.rmtree(rows)
        Dataset.from_list([*TALKS[:-1], TALKS[0]]).save_to_disk(rows)
        refuse("what the rows of data.train hold changed since")
        shutil.rmtree(rows)
        Dataset.from_list(TALKS).save_to_disk(rows)
        assert run_here(main_sl, "--config", path, resume, "steps=2", "name=third") == (0, ""), "as it was"


def test_files_of_a_reward_are_part_of_a_run(recipe, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.syspath_prepend(mine)
    (mine / "pay.py").write_text("def score(prompt, messages, *, rubric):\n    import payday\n    return {'a': 1.0}\n")
    (mine / "payday.py").write_text("import json, numpy, payroll\n")
    (mine / "payroll.py").write_text("AMOUNT = 1\n")
    (mine / "unused.py").write_text("")
    (mine / "rubric.txt").write_text("be kind")
    changes = {"reward.function": str(mine / "pay.py"), "reward.settings": {"rubric": str(mine / "rubric.txt")}}

    def hash_now() -> dict[str, str]:
        loaded = load_recipe(RLConfig, recipe(changes), [])
        plan, data = plan_rollouts(loaded.cfg), loaded.cfg.data
        tokenizer = make_tokenizer(loaded.cfg.model, data)
        return hash_inputs(loaded, plan.files, tokenizer, load_prompts(data, "train", tokenizer, seed=0))

    before = hash_now()
    assert [key for key in before if "file" in key] == [
        "the file payday.py beside your code",
        "the file payroll.py beside your code",
        "the file of reward.settings.rubric",
    ]
    assert hash_now() == before
    (mine / "payroll.py").write_text("AMOUNT = 2\n")
    (mine / "rubric.txt").write_text("be strict")
    after = hash_now()
    assert {key for key in after if after[key] != before[key]} == {
        "the file payroll.py beside your code",
        "the file of reward.settings.rubric",
    }


def test_a_file_of_a_folder_without_init_is_found(tmp_path, monkeypatch):
    (tmp_path / "plain_folder" / "deep").mkdir(parents=True)
    (scale := tmp_path / "plain_folder" / "deep" / "scale.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    mine = file_of(tmp_path / "mine.py", "from plain_folder.deep import scale, missing\n")
    spec = FileSpec(module="mine", path=mine, sha256="", in_package=False)
    assert list_imported_files([spec]) == [scale]


def test_an_import_that_is_no_python_file_is_passed_over(tmp_path, monkeypatch):
    """One of Python's own, a folder without code, and a module that only another machine has."""
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "really_there.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    mine = file_of(tmp_path / "mine.py", "import sys, empty_folder, unlikely_module, really_there\n")
    spec = FileSpec(module="mine", path=mine, sha256="", in_package=False)
    assert list_imported_files([spec]) == [tmp_path / "really_there.py"]


def test_a_package_installed_below_the_users_own_folder_is_passed_over(tmp_path, monkeypatch):
    (packages := tmp_path / "venv" / "site-packages").mkdir(parents=True)
    (packages / "really_installed.py").touch()
    (tmp_path / "really_mine.py").touch()
    for folder in (tmp_path, packages):
        monkeypatch.syspath_prepend(folder)
    mine = file_of(tmp_path / "mine.py", "import really_installed, really_mine\n")
    spec = FileSpec(module="mine", path=mine, sha256="", in_package=False)
    assert list_imported_files([spec]) == [tmp_path / "really_mine.py"]


@pytest.mark.parametrize("beside", ["main_rl.py", "feynrl.py", "algs/grpo.py"])
def test_what_code_in_the_clone_imports_of_feynrl_is_no_file_of_its_own(beside: str):
    spec = FileSpec(module="mine", path=str(ROOT / beside), sha256="", in_package=False)
    assert list_imported_files([spec]) == []


def test_a_resume_notices_a_model_that_was_trained_again(tiny_path, recipe, tmp_path):
    """Its files have the same names and sizes, and an adapter would go on upon another base."""
    base, teacher = (Path(shutil.copytree(tiny_path, tmp_path / name)) for name in ("base", "teacher"))
    alg = {"name": "opd", "teacher": str(teacher)}
    loaded = load_recipe(RLConfig, recipe({"model.path": str(base), "alg": alg}), [])
    then = collect_settings(loaded, {}, {})
    assert changed_files(then, collect_settings(loaded, {}, {})) == []
    for folder in (base, teacher):
        rewrite(folder, lambda tensors: [tensor.mul_(1.01) for tensor in tensors.values()])
    now = collect_settings(loaded, {}, {})
    assert changed_files(then, now) == ["the files of model.path", f"the files of {teacher}, which alg names"]
    older = {key: digest for key, digest in then["sha256"].items() if not key.startswith(MODEL_FILES)}
    assert changed_files({**then, "sha256": older}, now) == [], "a checkpoint from before there were hashes"


def test_the_hash_of_a_template_sees_what_it_refuses_and_why(tiny_path, tmp_path):
    def hash_of(name: str, says: str, role: str = "system") -> str:
        refuses = f"{{% if messages[0]['role'] == '{role}' %}}{{{{ raise_exception('{says}') }}}}{{% endif %}}"
        path = make_model(tiny_path, tmp_path / name, refuses + DATED.replace("strftime_now('%d %b %Y')", "''"))
        return hash_probes(make_tokenizer(ModelConfig(path=path), PromptDataConfig(train="x")))

    found = [hash_of("a", "no system"), hash_of("b", "no such role"), hash_of("c", "no system", "none")]
    assert len({*found}) == 3 and hash_of("d", "no system") == found[0]


def test_the_hash_of_rows_sees_every_column(tmp_path, tiny_path):
    chat = make_tokenizer(ModelConfig(path=tiny_path), PromptDataConfig(train="x"))
    row: dict[str, Any] = {"id": "a", "messages": "1+1=", "answer": "2", "level": 1}

    def hash_of(*rows: dict[str, Any]) -> str:
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = PromptDataConfig(train=str(tmp_path / "x.jsonl"))
        return hash_rows(load_prompts(data, "train", chat, seed=0).all())

    other = [{"id": "b"}, {"messages": "1+2="}, {"answer": "3"}, {"level": 2}]
    found = [hash_of(row), hash_of(row, row | {"id": "b"}), *(hash_of(row | change) for change in other)]
    assert len({*found}) == len(found) and hash_of(row) == found[0]


def test_the_hash_of_rows_sees_a_changed_image():
    def hash_of(color: str) -> str:
        written = BytesIO()
        Image.new("RGB", (28, 28), color).save(written, "PNG")
        part: Any = {"type": "image", "image": read_image(written.getvalue())}
        return hash_rows([Prompt(id="a", messages=[{"role": "user", "content": "", "parts": [part]}])])

    assert hash_of("red") != hash_of("blue")


def test_an_evaluation_goes_on_with_the_date_that_it_began_with(dated, sums, tmp_path):
    raw = {
        "name": "eval",
        "backend": "local",
        "model": {"path": dated, "dtype": "float32"},
        "data": {"sets": [{"path": str(sums / "eval.parquet"), "name": "sums"}], "max_prompt_tokens": 64},
        "reward": {"function": "arithmetic"},
        "rollout": {"engine": "hf", "max_new_tokens": 8},
    }
    begun = prepare_eval(load_eval_recipe(raw, ["data.template_date='2020-02-03'"]))
    (tmp_path / SETTINGS).write_text(json.dumps(begun.settings))
    (tmp_path / "parts").mkdir()
    again = prepare_eval(load_eval_recipe(raw, [f"resume={tmp_path}"]))
    for keys in (again.cfg.data, again.plan.data):
        assert keys.template_date == "2020-02-03T00:00:00"
    assert "03 Feb 2020" in again.tokenizer.render_text([{"role": "user", "content": "1"}], reply_next=True)
    assert prepare_eval(load_eval_recipe(raw, [])).settings["settings"]["data.template_date"] > "2026"


def test_an_evaluation_notices_another_template_rubric_or_helper(tiny_path, sums, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.syspath_prepend(mine)
    files = {
        "pay.py": "import rates_of_pay\n\ndef score(prompt, messages, *, rubric):\n    return {'correct': 1.0}\n",
        "rates_of_pay.py": "RATE = 1\n",
        "rubric.txt": "be kind",
        "chat.jinja": DATED.replace("strftime_now('%d %b %Y')", "'x'"),
    }
    for name, text in files.items():
        (mine / name).write_text(text)
    raw = {
        "name": "eval",
        "backend": "local",
        "model": {"path": make_model(tiny_path, tmp_path / "model", "unused"), "dtype": "float32"},
        "data": {
            "sets": [{"path": str(sums / "eval.parquet"), "name": "sums"}],
            "max_prompt_tokens": 64,
            "chat_template": str(mine / "chat.jinja"),
        },
        "reward": {"function": str(mine / "pay.py"), "settings": {"rubric": str(mine / "rubric.txt")}},
        "rollout": {"engine": "hf", "max_new_tokens": 8},
    }
    (tmp_path / SETTINGS).write_text(json.dumps(prepare_eval(load_eval_recipe(raw, [])).settings))

    def prepare_again(changed: str = "") -> None:
        if changed:
            (mine / changed).write_text(files[changed] + "\n# other\n")
        try:
            prepare_eval(load_eval_recipe(raw, [f"resume={tmp_path}"]))
        finally:
            (mine / (changed or "pay.py")).write_text(files[changed or "pay.py"])

    prepare_again()
    for name, words in {
        "chat.jinja": "the chat template of model.path changed since the samples were made",
        "rubric.txt": "the file of reward.settings.rubric changed since",
        "rates_of_pay.py": r"the file rates_of_pay\.py beside your code changed since",
        "pay.py": "the file of reward.function changed since",
    }.items():
        with pytest.raises(UserError, match=words):
            prepare_again(name)
    prepare_again()
    (tmp_path / "model" / "modeling.py").write_text("# other")
    with pytest.raises(UserError, match=r"the files of model\.path changed since"):
        prepare_again()


def test_settings_of_an_evaluation_hold_no_secret_and_may_get_a_new_one(tiny_path, tmp_path):
    tokenizer = make_tokenizer(ModelConfig(path=tiny_path), PromptDataConfig(train="x"))

    def collect(secret: str, *overrides: str) -> tuple[EvalConfig, dict[str, Any]]:
        address = f"https://{secret}:{secret}@host/rows.jsonl?X-Amz-Date={secret}&X-Amz-Signature={secret}&part=1"
        raw = {
            "name": "eval",
            "model": {"path": tiny_path},
            "data": {"sets": [{"path": address, "name": "a"}]},
            "reward": {"function": "arithmetic", "settings": {"api_key": secret}},
        }
        cfg = load_eval_recipe(raw, overrides)
        return cfg, collect_eval_settings(cfg, {}, tokenizer, None)

    _, then = collect("hunter2")
    assert "hunter2" not in json.dumps(then) and "part=1" in then["settings"]["data.sets.a.path"]
    _, now = collect("swordfish")
    assert find_samples(str(tmp_path), then, now, []).done == {}
    # a folder of an earlier version, with the secrets as they were
    cfg, _ = collect("hunter2")
    plain = then["settings"] | {"reward.settings.api_key": "hunter2", "data.sets.a.path": cfg.data.sets[0].path}
    assert find_samples(str(tmp_path), then | {"settings": plain}, now, []).done == {}
    _, other = collect("swordfish", "data.sets=[{path: https://host/other, name: a}]")
    with pytest.raises(UserError, match=r"data\.sets\.a\.path is .https://host/other.") as refused:
        find_samples(str(tmp_path), then | {"settings": plain}, other, [])
    assert "hunter2" not in str(refused.value)
    with pytest.raises(UserError, match=r"made before the chat template of model\.path was compared or existed"):
        find_samples(str(tmp_path), then | {"sha256": {}}, now, [])
