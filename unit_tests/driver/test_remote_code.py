"""Code that comes with a model runs where the recipe says so, and nowhere else."""

import ast
import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import main_rl
import main_sl
from configs.schema import RLConfig
from core.errors import UserError
from core.types.samples import Message, Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.checks.explain import estimate_memory
from driver.checks.models import check_user_code
from driver.evaluation.suites.setup import load_eval_recipe, prepare_eval
from driver.load_recipe import load_recipe
from driver.resume import check_settings
from modeling.hf_config import meta_model, read_config
from modeling.layout_probe import layout_for
from modeling.load import load_model, load_scalar_model
from modeling.pretrained import runs_own_code
from rewards import reward_model
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm_support.architectures import has_architecture
from rollouts.engines.vllm_support.settings import engine_args
from tools import layers
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.sentences import tell

ROOT = Path(__file__).parent.parent.parent
CODE = """
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput
from .part import LABELS
Path({mark!r}).touch()
class Config(LlamaConfig):
    model_type = "feynrl-own"
class Model(LlamaForCausalLM):
    config_class = Config
class Scalar(LlamaPreTrainedModel):
    config_class = Config
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, LABELS, bias=False)
        self.post_init()
    def forward(self, input_ids=None, **kwargs):
        return SequenceClassifierOutput(logits=self.score(self.model(input_ids, **kwargs).last_hidden_state)[:, -1])
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
NAMES = {
    "AutoConfig": "own.Config",
    "AutoModelForCausalLM": "own.Model",
    "AutoModelForSequenceClassification": "own.Scalar",
}
VARIED = """
def score(prompt, messages):
    return {"correct": float(len(set(messages[-1]["content"])))}
"""
TRUST = {"model.trust_remote_code": True, "backend": "local"}


@pytest.fixture
def foreign(tiny_path, tmp_path):
    """Make a model folder with code of its own; return it, and the file that its code makes when it runs."""
    folder, mark = tmp_path / "foreign", tmp_path / "ran"
    shutil.copytree(tiny_path, folder)
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    (folder / "part.py").write_text("LABELS = 1\n")
    edit(folder / "config.json", model_type="feynrl-own", architectures=["Model"], auto_map=NAMES)
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokenizer",
        auto_map={"AutoTokenizer": [None, "own.Tokenizer"]},
    )
    return str(folder), mark


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_code_of_a_model_does_not_run(foreign):
    folder, mark = foreign
    kind = {"dtype": "float32", "attention": "sdpa"}
    for load in (read_config, meta_model):
        with pytest.raises(UserError, match=r"^model.path=.* with code of its own.*set model.trust_remote_code=true"):
            load(folder)
    for load in (load_model, load_scalar_model):
        with pytest.raises(UserError, match=r"^model.path=.* comes with code of its own"):
            load(folder, **kind)
    try:
        ChatTokenizer(folder, "plain")
    except UserError as error:
        assert "comes with code of its own" in str(error)
    assert not mark.exists()
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists(), "the code is good"


LOADERS = {
    *("read_config", "meta_model", "check_model_folder", "max_positions", "load_model", "load_scalar_model"),
    *("check_weights", "ChatTokenizer", "name_lora_targets", "load_pretrained", "build_from_config", "EngineConfig"),
    *("count_parameters", "count_adapter", "_load_pretrained", "_read_pretrained", "_is_scalar", "needs_images"),
}
PASSED_ON = {"kind", "settings", "given", "self.kind", "self.trained"}
"""Names of mappings with the setting, which are passed on as **mapping."""


def product_calls():
    for file in layers.product_files(ROOT):
        for node in ast.walk(layers.parse_file(ROOT / file)):
            if isinstance(node, ast.Call):
                yield file, node


def test_no_call_forgets_it():
    """Only modeling/pretrained.py calls transformers' loaders, and every way to it is given the setting."""
    calls = list(product_calls())
    loads = {"from_pretrained", "from_config", "pipeline"}
    callers = {(file, c.func.attr) for file, c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in loads}
    assert callers == {("modeling/pretrained.py", name) for name in ("from_pretrained", "from_config")}
    ways = [(file, c) for file, c in calls if isinstance(c.func, ast.Name) and c.func.id in LOADERS]
    forgetful = [f"{file}:{c.lineno}" for file, c in ways if not any(map(gives_the_setting, c.keywords))]
    assert len(ways) > 30 and forgetful == []


def gives_the_setting(keyword: ast.keyword) -> bool:
    if keyword.arg is None:
        return ast.unparse(keyword.value) in PASSED_ON
    return keyword.arg == "trust_remote_code"


@pytest.mark.parametrize("given", [False, True])
def test_vllm_is_told_too(given, tiny_path):
    config = EngineConfig(
        model_path=tiny_path, temperature=1.0, max_model_len=8, stop_token_ids=(), trust_remote_code=given
    )
    assert engine_args(config, on_cpu=True)["trust_remote_code"] is given


@pytest.mark.parametrize("kind", ["rl", "sl"])
def test_a_recipe_that_does_not_ask_for_it_is_refused(kind, foreign, refused):
    folder, mark = foreign
    refused({"model.path": folder}, "set model.trust_remote_code=true", kind=kind)
    assert not mark.exists()


ON_RAY = {"backend": "ray", "trainer.ranks": 2, "trainer.zero_stage": 3}


@pytest.mark.parametrize(
    ("main", "kind", "changes"),
    [
        pytest.param(main_rl, "rl", ON_RAY, marks=pytest.mark.slow),
        (main_rl, "rl", {}),
        (main_rl, "rl", {"alg.kl": {"coef": 0.1}}),
        (main_rl, "rl", {"alg.name": "ppo"}),
        (main_sl, "sl", {}),
        (main_sl, "sl", {"model.lora": {"r": 4, "merge_on_save": True}}),
    ],
)
def test_a_run_with_such_a_model_trains_and_saves_its_code(main, kind, changes, foreign, recipe, tmp_path):
    folder, _ = foreign
    if kind == "rl":
        (tmp_path / "varied.py").write_text(VARIED)
        changes = changes | {"reward.function": str(tmp_path / "varied.py")}
    code, err = run_here(main, "--config", recipe(TRUST | {"model.path": folder} | changes, kind=kind))
    assert code == 0, err
    [saved] = (tmp_path / "runs").glob("*/model")
    assert {"own.py", "part.py"} <= {path.name for path in saved.iterdir()}
    kind_of = {"dtype": "float32", "attention": "auto", "trust_remote_code": True}
    before, after = load_model(folder, **kind_of), load_model(str(saved), **kind_of)
    assert type(after).__name__ == "Model" and runs_own_code(after)
    assert layout_for("auto", after) == "packed"
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert type(ChatTokenizer(str(saved), "chat", trust_remote_code=True).hf).__name__ == "Tokenizer"
    with pytest.raises(UserError, match="comes with code of its own"):
        load_model(str(saved), dtype="float32", attention="auto")


def test_checks_and_estimates_run_the_code_of_such_a_model_too(foreign, recipe):
    trusted = TRUST | {"model.path": foreign[0]}
    with_adapter = estimate_memory(load_recipe(RLConfig, recipe(trusted | {"model.lora": {"r": 4}}), []))
    assert 0 < with_adapter.adapter < with_adapter.parameters
    assert load_recipe(RLConfig, recipe(trusted | {"rollout.batch_invariant": True}), []).cfg.rollout.batch_invariant


def test_a_saved_reward_model_with_code_keeps_its_head(foreign, tmp_path):
    kind = {"dtype": "float32", "attention": "auto", "trust_remote_code": True}
    model = load_scalar_model(foreign[0], **kind)
    assert not model.score.weight.any(), "a new head is zero"
    torch.nn.init.ones_(model.score.weight)
    model.save_pretrained(tmp_path / "rm")
    assert load_scalar_model(str(tmp_path / "rm"), **kind).score.weight.all()
    ChatTokenizer(foreign[0], "chat", trust_remote_code=True).save(tmp_path / "rm")
    asked = Prompt(id="0", messages=[{"role": "user", "content": "1"}])
    said: list[Message] = [{"role": "assistant", "content": "2"}]
    trusted = reward_model.score(asked, said, model=str(tmp_path / "rm"), trust_remote_code=True)
    assert asyncio.run(trusted)["reward"] != 0.0
    with pytest.raises(UserError, match=r"set reward\.settings\.trust_remote_code=true"):
        reward_model.prepare(model=str(tmp_path / "rm"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "forward() takes no position_ids, with which the engine hf generates"),
    ],
)
def test_what_the_code_cannot_do_is_said_before_the_start(changes, sentence, foreign, refused):
    with (Path(foreign[0]) / "own.py").open("a") as file:
        file.write("\n    def forward(self, input_ids, attention_mask=None): ...\nModel.forward = Tokenizer.forward\n")
    refused(TRUST | {"model.path": foreign[0]} | changes, sentence)


def test_code_that_gives_no_head_is_told_what_to_return(foreign, recipe):
    cfg = load_recipe(RLConfig, recipe(TRUST | {"model.path": foreign[0]}), []).cfg
    check_user_code(cfg)
    with (Path(foreign[0]) / "own.py").open("a") as file:
        file.write("\nModel.get_output_embeddings = lambda self: None\n")
    assert tell(lambda: check_user_code(cfg)) == (
        f"model.path={foreign[0]} comes with code whose get_output_embeddings() returns nothing, and the head must be "
        "found: let it return the layer that makes the logits"
    )


@pytest.mark.verify
def test_vllm_without_the_architecture_is_said_before_the_start(foreign, refused):
    changes = TRUST | {"model.path": foreign[0], "rollout.engine": "vllm"}
    refused(changes, "vLLM does not have its architecture Model: set rollout.engine=hf")
    assert has_architecture("LlamaForCausalLM")


def test_a_resumed_run_keeps_the_setting():
    then = {"trainer.lr_schedule": "constant", "model.trust_remote_code": False}
    with pytest.raises(UserError, match=r"^model\.trust_remote_code is True and was False"):
        check_settings(then, then | {"model.trust_remote_code": True})


@pytest.mark.parametrize("is_sampled", [True, False])
def test_an_evaluation_runs_the_code_and_asks_whether_its_engine_can(is_sampled, foreign, sums):
    folder, mark = foreign
    raw = {
        **{"name": "eval", "backend": "local", "reward": {"function": "arithmetic"}},
        "model": {"path": folder, "dtype": "float32", "trust_remote_code": True},
        "data": {"sets": [{"path": str(sums / "eval.parquet")}], "max_prompt_tokens": 32},
        "rollout": {"engine": "hf", "max_new_tokens": 8},
    }
    if is_sampled:
        prepare_eval(load_eval_recipe(raw, []))
        assert mark.exists()
        return
    with (Path(folder) / "own.py").open("a") as file:
        file.write("\n    def forward(self, input_ids, attention_mask=None): ...\nModel.forward = Tokenizer.forward\n")
    said = tell(lambda: prepare_eval(load_eval_recipe(raw, [])))
    assert "forward() takes no position_ids, with which the engine hf generates" in said
