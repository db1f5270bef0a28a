import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from data_feeds.chat.tokenizer import ChatTokenizer
from data_prep import arithmetic, tiny_model
from unit_tests.helpers import template_families
from unit_tests.helpers.chat_families import FAMILIES, load_family
from unit_tests.helpers.examples import run_here
from unit_tests.helpers.models import make_mixture
from unit_tests.helpers.pretend_cuda import PretendDevice, pretend_cuda
from unit_tests.helpers.runs import folder_of

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a model hub
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
gc.set_threshold(100_000, 20, 50)  # a sixth of the fast tests' time went into looking through what stays
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C


def pytest_configure() -> None:
    if find_spec("hypothesis"):  # the tests for a GPU do without
        from hypothesis import HealthCheck, settings

        # a busy machine is no failure
        settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("busy")


def pytest_collection_finish() -> None:
    gc.freeze()  # the libraries and the collected tests


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    """A random two-layer Llama with a tokenizer of characters, saved."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model.make(folder)
    return str(folder)


@pytest.fixture(scope="session")
def families(tiny_path, tmp_path_factory) -> dict[str, ChatTokenizer]:
    """The tiny model's tokenizer with the chat template of every family."""
    folder = tmp_path_factory.mktemp("families")
    return {family: load_family(tiny_path, folder, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory) -> dict[str, ChatTokenizer]:
    """The tokenizers of thirty families, with their chat templates."""
    return {name: family.load(tmp_path_factory.mktemp("family")) for name, family in template_families.FAMILIES.items()}


@pytest.fixture(scope="session")
def qwen(families) -> ChatTokenizer:
    return families["qwen2.5"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """These models are too small for two, which would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cuda_device() -> Iterator[PretendDevice]:
    """The pretend CUDA device, for tests that ask for no device by name; it counts what the host waits for."""
    with pretend_cuda() as device:
        yield device


@pytest.fixture(scope="session")
def mixture_path(tmp_path_factory) -> str:
    """The folder of a tiny mixture of experts, with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("mixture")
    make_mixture(folder)
    return str(folder)


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """A folder with train, eval and sft files of one-digit additions."""
    folder = tmp_path_factory.mktemp("sums")
    arithmetic.main(["--out", str(folder), "--max", "9", "--train", "30", "--eval", "10", "--sft", "15"])
    return folder


@pytest.fixture
def recipe(tmp_path, tiny_path, sums):
    """Write a small, valid RL recipe with changes (dotted keys), and return its path."""

    def write(changes: dict | None = None, *, kind: str = "rl") -> str:
        common = {
            "name": "test",
            "steps": 2,
            "backend": "local",
            "run_dir": str(tmp_path / "runs"),
            "model": {"path": tiny_path, "dtype": "float32"},
        }
        rl = {
            "groups_per_step": 4,
            "group_size": 4,
            "alg": {"name": "grpo"},
            "data": {"train": str(sums / "train.parquet"), "max_prompt_tokens": 32},
            "reward": {"function": "arithmetic", "workers": 1},
            "rollout": {"engine": "hf", "max_new_tokens": 8},
            "trainer": {"lr": 1e-3},
        }
        sl = {
            "rows_per_step": 5,
            "alg": {"name": "sft"},
            "data": {"train": str(sums / "sft.parquet"), "max_tokens": 32},
            "trainer": {"lr": 1e-3},
        }
        raw = common | (rl if kind == "rl" else sl)
        for dotted, value in (changes or {}).items():
            *parents, last = dotted.split(".")
            node = raw
            for key in parents:
                node = node.setdefault(key, {})
            if value is None:
                del node[last]
            else:
                node[last] = value
        path = tmp_path / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(raw))
        return str(path)

    return write


@pytest.fixture
def refused(recipe, tmp_path):
    """Check that a recipe with changes is refused in one sentence with these words; return the sentence."""
    import main_rl
    import main_sl

    def check(changes: dict, *words: str, kind: str = "rl") -> str:
        code, err = run_here(main_rl if kind == "rl" else main_sl, "--config", recipe(changes, kind=kind))
        assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1, err
        assert all(word in err for word in words), err
        assert not (tmp_path / "runs").exists(), "nothing was started"
        return err

    return check


@pytest.fixture
def trained(recipe, tmp_path):
    """Run a recipe with changes to its end in this process, and return the run's folder."""
    import main_rl
    import main_sl

    def run(changes: dict | None = None, *overrides: str, kind: str = "rl", name: str = "*") -> Path:
        path = recipe(changes, kind=kind)
        code, err = run_here(main_rl if kind == "rl" else main_sl, "--config", path, *overrides)
        assert code == 0, err
        return folder_of(tmp_path, name)

    return run
