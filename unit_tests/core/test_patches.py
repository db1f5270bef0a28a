"""Private parts of other libraries are still there: core/patches.py, and vllm_support/patches.py for vLLM's."""

from __future__ import annotations

import ast
import pickle
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch

from core.patches import PATCHES, Patch, begin_shared_memory_names, is_grad_switch, loopback_ray, patched
from tools.layers import parse_file
from tools.private_names import BY_STRING, PATCH_FILES, find_in

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "ray", "transformers", "deepspeed", "vllm", "datasets", "huggingface_hub")


def all_patches() -> list[Patch]:
    from modeling import patches as of_models
    from rollouts.engines.vllm_support import patches

    return [*PATCHES, *of_models.PATCHES, *patches.PATCHES]


def is_there(target: str) -> bool:
    """Tell whether a library still defines a name; its source is read, unless the name is compiled."""
    library, *names = target.split(".")
    spec = find_spec(library)
    assert spec is not None, f"{library} is not installed"
    at = Path(spec.origin or "").parent
    while names and (at / names[0]).is_dir():
        at /= names.pop(0)
    if names and (at / f"{names[0]}.py").is_file():
        at /= f"{names.pop(0)}.py"
    else:
        at /= "__init__.py"
    return (at.is_file() and defines(ast.parse(at.read_text()), names)) or is_compiled(target)


def is_compiled(target: str) -> bool:
    if target.split(".")[0] not in ("ray", "torch"):  # to import the others takes long
        return False
    try:
        return pkgutil.resolve_name(target) is not None
    except (AttributeError, ImportError):
        return False


def defines(tree: ast.AST, names: list[str]) -> bool:
    """Tell whether a module or class defines a name: by a statement, or as an attribute of self in a method."""
    name, *rest = names
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                if not rest or defines(node, rest):
                    return True
            case ast.Name(id=found, ctx=ast.Store()) | ast.Attribute(attr=found, ctx=ast.Store()) if found == name:
                return not rest
            case ast.Constant(value=found) | ast.alias(asname=found) if found == name:  # of a module's __getattr__
                return not rest
            case _:
                pass
    return False


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.target)
def test_the_target_is_there_in_the_version_that_is_named(patch):
    assert is_there(patch.target), (
        f"{patch.target} is gone; it was tested with {patch.tested}, and used because {patch.reason}"
    )


def test_the_versions_are_those_of_the_lock():
    locked = {"python 3.11", *(ROOT / "constraints.txt").read_text().replace("==", " ").splitlines()}
    for patch in all_patches():
        assert patch.tested in locked, f"{patch.target}: look whether the new version has a public way"


def test_a_target_that_is_gone_is_noticed():
    assert not any(map(is_there, ("torch._C._set_grad_disabled", "ray._private.worker._logs", "deepspeed.ops.__ops__")))


def test_every_private_name_of_the_patch_files_is_listed():
    listed = {part for patch in all_patches() for part in patch.target.split(".")}
    for file in PATCH_FILES:
        tree = ast.parse((ROOT / file).read_text())
        own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
            n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        }
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in BY_STRING]
        own |= {str(arg.value) for call in calls for arg in call.args if isinstance(arg, ast.Constant)}
        used = {name for name in own if re.fullmatch(r"_[a-z]\w+", name)} - {"_cls"}
        assert used <= listed, f"{file}: {used - listed}"


def test_what_the_patch_files_replace_or_reach_is_listed():
    listed = {part for patch in all_patches() for part in patch.target.split(".")}
    for file in PATCH_FILES:
        tree = parse_file(ROOT / file)
        nodes = [*ast.walk(tree)]
        found = [what for _, what in find_in(tree, set()) if what.endswith(" =")]
        assigned = {what.removesuffix(" =").rpartition(".")[2] for what in found}
        calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "patched"]
        replaced = {keyword.arg for call in calls for keyword in call.keywords}
        bound = [node for node in nodes if isinstance(node, ast.AnnAssign) and node.value is not None]
        modules = {ast.unparse(node.target) for node in bound if "import_module(" in ast.unparse(node.value)}
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        reached = {node.attr for node in attributes if ast.unparse(node.value) in modules}
        used = assigned | replaced | reached
        assert used <= listed, f"{file}: {used - listed}"


def test_nothing_heavy_is_imported_with_the_list():
    code = f"import sys, core.patches; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_attribute_is_as_it_was_after_the_body():
    class Owner:
        value = 1

    with pytest.raises(ZeroDivisionError), patched(Owner, value=2):
        assert Owner.value == 2
        raise ZeroDivisionError
    assert Owner.value == 1


def test_ray_finds_the_loopback_address_inside_of_the_body_alone():
    """Ray reads its constant when it looks for the address on which a cluster listens."""
    from ray._private import ray_constants
    from ray.util import get_node_ip_address

    usual = ray_constants.ENABLE_RAY_CLUSTER
    with loopback_ray():
        assert not ray_constants.ENABLE_RAY_CLUSTER and get_node_ip_address() in ("127.0.0.1", "::1")
    assert ray_constants.ENABLE_RAY_CLUSTER is usual


def test_switching_gradients_is_told_from_other_calls():
    seen: list[bool] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(is_grad_switch(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.set_grad_enabled(True)
        torch.ones(1).exp()
    assert seen[0] and not any(seen[1:])


def test_named_memory_is_found_by_its_name_and_read_under_it(monkeypatch):
    monkeypatch.setattr(shared_memory, "SharedMemory", shared_memory.SharedMemory)
    begin_shared_memory_names("ours-")
    begin_shared_memory_names("mine-")
    made = shared_memory.SharedMemory(create=True, size=8)
    chosen = shared_memory.SharedMemory("chosen-by-a-test", create=True, size=8)
    try:
        assert made.name.startswith("mine-") and chosen.name == "chosen-by-a-test"
        made.buf[0] = 7
        for again in (shared_memory.SharedMemory(made.name), pickle.loads(pickle.dumps(made))):
            assert again.buf[0] == 7
            again.close()
    finally:
        for memory in (made, chosen):
            memory.close()
            memory.unlink()
