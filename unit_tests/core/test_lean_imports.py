"""Large libraries are imported without what nothing here uses: core/lean_imports.py."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import utils

from core.lean_imports import UNUSED, lean_transformers, without_package

ROOT = Path(__file__).parent.parent.parent
READ_A_MODEL = """
from data_feeds.chat.tokenizer import ChatTokenizer
from modeling.hf_config import meta_model
ChatTokenizer(sys.argv[1], "chat")
meta_model(sys.argv[1])
"""
START_DEEPSPEED = """
import datetime, torch
from trainers.deepspeed import DeepSpeedTrainer
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
DeepSpeedTrainer.start_library(None, datetime.timedelta(seconds=60))
from deepspeed.runtime.zero.utils import is_zero_supported_optimizer
assert is_zero_supported_optimizer(torch.optim.AdamW([torch.zeros(1)]))
"""
START_VLLM = """
from multiprocessing import Pipe
from rollouts.engines.base import EngineConfig
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.early_core import _import_and_wait
work, parent = Pipe(duplex=False)
parent.close()
_import_and_wait(work)  # as EngineCore; its parent is gone
try:
    VllmEngine(EngineConfig(model_path=sys.argv[1], dtype="float32", temperature=1.0, max_model_len=10**9,
                            stop_token_ids=(), kv_cache_gib=0.1))
except Exception:  # vLLM refuses such a length
    assert "vllm.v1.engine.async_llm" in sys.modules
"""
READ_PARQUET = """
from pathlib import Path
from data_feeds.rows.sources import _read_parquet
assert _read_parquet(Path(sys.argv[2]), "data.train") == [{"a": 1}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        (READ_A_MODEL, ("sklearn", "scipy")),
        (START_DEEPSPEED, ("mlflow", "torch._inductor.lowering")),
        (START_VLLM, ("scipy",)),
        (READ_PARQUET, ("pandas",)),
    ],
)
def test_a_process_does_not_import_what_nothing_uses(code, left_out, tiny_path, tmp_path):
    if lacking := [name for name in left_out if find_spec(name) is None]:
        pytest.skip(f"{lacking[0]} is not installed")
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), file)
    show = f"print([name for name in {left_out} if name in sys.modules])"
    command = [sys.executable, "-c", f"import sys\n{code}\n{show}", tiny_path, str(file)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_afterwards_all_is_as_it_was():
    before = {name: getattr(utils, name) for name in UNUSED}
    with pytest.raises(ZeroDivisionError), lean_transformers():
        assert not any(getattr(utils, name)() for name in UNUSED)
        raise ZeroDivisionError
    assert before == {name: getattr(utils, name) for name in UNUSED}


def test_a_package_is_hidden_in_the_body_only(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with without_package("mlflow"), pytest.raises(ImportError):
        import mlflow  # noqa: F401
    assert "mlflow" not in sys.modules


def test_a_package_stays_where_it_is_imported_already(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", pytest)
    with without_package("mlflow"):
        import mlflow
    assert mlflow is pytest
