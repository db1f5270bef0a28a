"""What only GPU runs use of other libraries is there: core/gpu_contract.py, against the builds that are installed."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from configs.rollout_schema import RolloutConfig
from configs.trainer_schema import LoraConfig
from core.gpu_contract import PARTS, Part, load_part
from core.types.truncation import Truncation
from rollouts.engines.vllm_support.settings import engine_args
from tools.gpu_contract import find_faults, read_versions
from tools.layers import ROOT, parse_file, product_files
from unit_tests.helpers.engines import engine_config

FILES = [*product_files(ROOT), *(str(path.relative_to(ROOT)) for path in (ROOT / "tools").rglob("*.py"))]
SHRINK = "lora/ops/triton_ops/lora_shrink_op.py"
ON_GPU_BUILD = torch.version.cuda is not None


def as_case(part: Part):
    # the others take seconds to import
    return pytest.param(part, id=part.target, marks=[] if part.target.startswith("torch") else pytest.mark.slow)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", [as_case(part) for part in PARTS])
def test_a_part_is_as_this_code_uses_it(part):
    if part.gpu_build_only and not ON_GPU_BUILD:
        pytest.skip("the CPU build of torch lacks it")
    assert find_faults(part) == []


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU_BUILD, reason="the CPU builds come without NCCL")
def test_vllm_loads_the_nccl_library_of_the_gpu_build():
    assert load_part("NCCLLibrary")().ncclGetVersion().startswith("2.")


@pytest.mark.slow
def test_vllm_takes_the_settings_of_an_engine_on_a_gpu(tiny_path):
    arguments = load_part("EngineArgs")
    lora = LoraConfig(r=8, alpha=16, targets=["q_proj"])
    # a folder, since vLLM looks for a name at once where the hub is off
    config = engine_config(tiny_path, sleep="discard", lora=lora)
    settings = engine_args(config, on_cpu=False, sees=True)
    assert settings["enable_sleep_mode"] and settings["enable_chunked_prefill"]
    assert arguments(**settings).enable_sleep_mode


def test_what_an_engine_is_given_on_a_gpu_alone_is_listed(tiny_path):
    [listed] = [part.arguments for part in PARTS if part.target.endswith(":EngineArgs")]
    config = engine_config(tiny_path, sleep="discard", routes=True, truncation=Truncation(top_k=5))
    on_gpu, on_cpu = (engine_args(config, on_cpu=is_cpu) for is_cpu in (False, True))
    assert on_gpu.keys() - on_cpu.keys() <= {*listed} <= on_gpu.keys()


def read_vllm(path: str) -> ast.Module:
    """Parse a file of the installed vLLM, which both builds have, and which imports slowly."""
    [folder] = find_spec("vllm").submodule_search_locations
    return ast.parse((Path(folder) / path).read_text(encoding="utf-8"))


def test_a_mask_on_a_gpu_holds_every_token_that_a_recipe_may_allow():
    body = read_vllm("v1/worker/gpu/sample/logit_bias.py").body
    values = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    [most] = [limit.max_length for limit in RolloutConfig.model_fields["allowed_tokens"].metadata]
    # some more ids are those of stop tokens
    assert ast.literal_eval(values["MAX_NUM_ALLOWED_TOKEN_IDS"]) >= most + 24


def test_vllms_kernels_for_adapters_still_take_no_float32():
    asserted = [ast.unparse(n.test) for n in ast.walk(read_vllm(SHRINK)) if isinstance(n, ast.Assert)]
    assert "inputs.dtype in [torch.float16, torch.bfloat16]" in asserted


def attributes_of(name: str, files: Sequence[str] = FILES) -> set[str]:
    return {
        node.attr
        for file in files
        for node in ast.walk(parse_file(ROOT / file))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name
    }


def test_every_function_of_torch_cuda_that_is_used_is_listed():
    [listed] = [part.attributes for part in PARTS if part.target == "torch.cuda"]
    used = attributes_of("torch.cuda")
    assert len(used) > 10 and used <= {*listed}


def test_what_is_read_of_a_finished_request_of_vllm_is_listed():
    folder = "rollouts/engines/vllm_support"
    listed = {part.target.rpartition(":")[2]: {*part.attributes} for part in PARTS}
    used = attributes_of("output", [f"{folder}/{name}.py" for name in ("kept_sets", "routes")])
    assert used - {"token_ids"} == listed["CompletionOutput"], "runs on a CPU read its token_ids too"
    assert attributes_of("output.sampling_mask") == listed["SamplingMask"]


def test_every_part_that_is_loaded_is_listed():
    calls = [node for file in FILES for node in ast.walk(parse_file(ROOT / file)) if isinstance(node, ast.Call)]
    loaded = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "load_part"]
    names = {name.value for name in loaded if isinstance(name, ast.Constant)}
    assert {"stateless_init_process_group", "varlen_attn", "rebuild_cuda_tensor"} <= names
    assert names <= {part.target.rpartition(":")[2] for part in PARTS}


def test_a_part_of_torch_is_called_with_the_arguments_that_are_listed():
    listed = {p.target.rpartition(":")[2]: p for p in PARTS if p.arguments and p.target.startswith("torch.")}
    calls = [node for file in FILES for node in ast.walk(parse_file(ROOT / file)) if isinstance(node, ast.Call)]
    found = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    used = [(listed[name], call) for name, call in found if name in listed]
    for part, call in used:
        assert (len(call.args), len(call.args) + len(call.keywords)) == (part.by_position, len(part.arguments))
    assert {part.target for part, _ in used} == {
        "torch.multiprocessing.reductions:reduce_tensor",
        "torch.nn.attention.varlen:varlen_attn",
        "torch.cuda:get_device_properties",
    }


class Owner:
    """Class with one attribute of each kind."""

    annotated: int

    def __init__(self) -> None:
        self.assigned = 1

    def method(self, first: int, second: int, *, third: int) -> Owner:
        return self

    def by_name(self, *, only: int) -> int:
        return only


HERE = f"{__name__}:Owner"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Part(target=HERE, attributes=("annotated", "assigned", "method")), None),
        (Part(target=f"{HERE}.method", arguments=("first", "second", "third"), by_position=2), None),
        (Part(target=f"{HERE}.by_name", arguments=("only",)), None),
        (Part(target=f"{HERE}.method", result=("method",)), None),
        (Part(target=f"{__name__}:Gone"), "is gone"),
        (Part(target="torch.gone"), "is gone"),
        (Part(target=HERE, attributes=("assign",)), "has no assign"),
        (Part(target=f"{HERE}.method", arguments=("first", "second", "fourth")), "unexpected keyword|missing"),
        (Part(target=f"{HERE}.method", arguments=("first", "second")), "missing a required"),
        (Part(target=f"{HERE}.method", arguments=("second", "first", "third"), by_position=2), "by position"),
        (Part(target=f"{HERE}.method", result=("gone",)), "without gone"),
    ],
)
def test_what_a_library_lacks_is_found(part, says):
    faults = find_faults(part)
    assert (faults == []) if says is None else (len(faults) == 1 and re.search(says, faults[0]))


def test_the_gpu_set_has_every_package_that_a_run_may_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [re.split("==+", line) for line in read_versions()]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"], "pytest"]
    for line in wanted:
        assert re.split("[>=]", line)[0].lower() in {name.lower() for name, _ in versions}
    assert "torch===2.13.0" in read_versions(), "else pip takes a CPU build where it finds one"
