"""Code that comes with a model never runs."""

import ast
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from configs.schema import RLConfig
from core.errors import UserError
from data_feeds.tokenizer import ChatTokenizer
from driver.load_recipe import load_recipe
from modeling.hf_config import meta_model, read_config
from modeling.load import load_model, load_scalar_model
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm_support.common import engine_args
from tools import layers

ROOT = Path(__file__).parent.parent
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class Config(LlamaConfig):
    model_type = "feynrl-own"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def foreign(tiny_path, tmp_path):
    """A model folder with code of its own, and the file that its code would make."""
    folder, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_path, folder)
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    edit(folder / "config.json", model_type="feynrl-own", auto_map={"AutoConfig": "own.Config"} | NAMES)
    edit(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Tokenizer"]})
    return str(folder), mark


NAMES = {"AutoModelForCausalLM": "own.Model", "AutoModelForSequenceClassification": "own.Model"}


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_code_of_a_model_does_not_run(foreign):
    folder, mark = foreign
    kind = {"dtype": "float32", "attention": "sdpa"}
    for load in (read_config, meta_model):
        with pytest.raises(UserError, match=r"^model.path: .*config.json cannot be read"):
            load(folder)
    for load in (load_model, load_scalar_model):
        with pytest.raises(UserError, match=r"^model.path.* cannot be (loaded|read)"):
            load(folder, **kind)
    try:
        ChatTokenizer(folder, "plain")
    except UserError as error:
        assert "its tokenizer cannot be loaded" in str(error)
    assert not mark.exists()
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists(), "the code is good"


def test_no_call_forgets_it():
    """Only modeling/pretrained.py calls transformers' loaders; it gives them the setting."""
    callers = {
        (file, node.attr)
        for file in layers.product_files(ROOT)
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config", "pipeline")
    }
    assert callers == {("modeling/pretrained.py", name) for name in ("from_pretrained", "from_config")}


def test_vllm_is_told_too():
    config = EngineConfig(model_path="m", temperature=1.0, max_model_len=8, stop_token_ids=())
    assert engine_args(config, on_cpu=True)["trust_remote_code"] is False


def test_a_recipe_that_asks_for_it_is_refused(recipe):
    assert load_recipe(RLConfig, recipe({"model.trust_remote_code": False}), []).cfg.model.trust_remote_code is False
    with pytest.raises(UserError, match=r"model\.trust_remote_code.*true would run code that comes with the model"):
        load_recipe(RLConfig, recipe({"model.trust_remote_code": True}), [])
