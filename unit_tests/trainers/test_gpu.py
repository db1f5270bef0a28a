"""What differs on a GPU. These need torch, transformers, numpy, pydantic and pytest; without a GPU they are skipped."""

import os

import pytest
import torch

from modeling.attention_varlen import fits_varlen
from modeling.forward import forward
from modeling.load import load_model
from tools.gpu_day.bench import Bench, make_batches
from tools.gpu_day.rows import BY_NAME, run_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", ["attention", "logp", "update", "waits", "checksum", "sync"])
def test_a_gpu_computes_what_a_cpu_computes(name, tmp_path):
    done = run_row(BY_NAME[name], tmp_path, rehearse=False)
    assert done.state == "ok", done


def test_flash_attention_of_torch_takes_half_precision_alone():
    query = torch.zeros(1, 4, 8, 64, device="cuda", dtype=torch.bfloat16)
    assert fits_varlen(query, query) and not fits_varlen(query.float(), query.float())


@pytest.mark.skipif(os.environ.get("FLASH") != "1", reason="set FLASH=1 where flash-attn is installed")
@torch.no_grad()
def test_flash_attention_takes_the_borders(tmp_path):
    path = Bench(device="cuda", folder=tmp_path).make_model("bfloat16")
    [batch] = make_batches(10_000, padded=False)
    models = [load_model(path, dtype="bfloat16", attention=a).cuda() for a in ("sdpa", "flash_attention_2")]
    padded, packed = (
        forward(m, m, batch.to("cuda"), layout=layout, temperature=1.0).logp
        for m, layout in zip(models, ("padded", "packed"), strict=True)
    )
    assert (padded - packed).abs().mean() < 0.02
