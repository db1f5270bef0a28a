"""A trained model that writes: for tools/generate.py and tools/chat.py.

MODEL is a run folder, a model folder, an adapter, a checkpoint of a run, or a name on the hub. Chat template, system
prompt, stop strings and temperature are those of the run that saved the model, where its config.yaml can be found.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import yaml

from core.cli import run_guarded
from core.errors import UserError, quote
from core.types.messages import Message

PROGRESS = "progress.json"
"""File of a checkpoint."""
LONGEST = 1024
"""Tokens of a reply, where no run says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Files of a model."""

    folder: str
    """Folder or hub name of the tokenizer, and of the weights where there is no adapter."""
    base: str
    """Folder or hub name of the model below an adapter; else as `folder`."""
    recipe: dict[str, Any]
    """The recipe of the run that saved it; empty if that is not found."""

    def get(self, section: str, key: str, default: Any) -> Any:
        """Return a value of the recipe, or the default."""
        return (self.recipe.get(section) or {}).get(key, default)


def find_model(name: str, *, trust_remote_code: bool = False) -> Found:
    """Find a model and its run; write that of a checkpoint into a temporary folder. Raises UserError for none."""
    from driver.checks.output_folder import MARKER

    path = Path(name)
    if (path / PROGRESS).is_file():
        return _unpack_checkpoint(name, trust_remote_code=trust_remote_code)
    if (path / "config.yaml").is_file():
        if not (path / "model").is_dir():
            raise UserError(f"{quote(name)} is a run folder without model/: the run has not saved its model")
        return _in_folder(path / "model", _read_recipe(path))
    if path.is_dir():
        marker = path / MARKER
        run = Path(json.loads(marker.read_text(encoding="utf-8"))["run"]) if marker.is_file() else path.parent
        return _in_folder(path, _read_recipe(run))
    if os.sep in name and name.count("/") != 1:
        raise UserError(f"{quote(name)}: there is no such folder")
    return Found(folder=name, base=name, recipe={})


def _unpack_checkpoint(name: str, *, trust_remote_code: bool) -> Found:
    from data_feeds.chat.tokenizer import ChatTokenizer
    from driver.checkpoint_model import find_checkpoint_model, write_checkpoint_model

    checkpoint = find_checkpoint_model(name)
    assert checkpoint is not None, "there is a progress.json"
    temporary = TemporaryDirectory(prefix="feynrl-checkpoint-")
    atexit.register(temporary.cleanup)
    write_checkpoint_model(checkpoint, Path(temporary.name), trust_remote_code=trust_remote_code)
    ChatTokenizer(checkpoint.base, "plain", trust_remote_code=trust_remote_code).save(Path(temporary.name))
    return _in_folder(Path(temporary.name), _read_recipe(checkpoint.run))


def _read_recipe(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}


def _in_folder(folder: Path, recipe: dict[str, Any]) -> Found:
    from modeling.merge import ADAPTER_CONFIG

    adapter = folder / ADAPTER_CONFIG
    if adapter.is_file() and not (folder / "config.json").is_file():
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        return Found(folder=str(folder), base=base, recipe=recipe)
    if not (folder / "config.json").is_file():
        raise UserError(f"{quote(folder)} holds neither a model (config.json) nor an adapter ({ADAPTER_CONFIG})")
    return Found(folder=str(folder), base=str(folder), recipe=recipe)


class Speaker:
    """Model with its tokenizer and its ends of replies."""

    def __init__(
        self,
        found: Found,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        system: str | None = None,
        trust_remote_code: bool = False,
    ):
        import torch

        from data_feeds.chat.tokenizer import ChatTokenizer
        from modeling.hf_config import check_model_folder, max_positions, read_config
        from modeling.pretrained import load_adapter
        from rollouts.engines.base import EngineConfig
        from rollouts.engines.hf import HfEngine
        from rollouts.stops import Stops

        trusts: dict[str, Any] = {"key": "MODEL", "trust_remote_code": trust_remote_code}
        check_model_folder(found.base, **trusts)
        [kind, *_] = getattr(read_config(found.base, **trusts), "architectures", None) or [""]
        if kind.endswith("ForSequenceClassification"):
            raise UserError(f"MODEL={found.folder} is a reward or value model: it scores text and writes none")
        self.system = found.get("data", "system_prompt", None) if system is None else system
        self.max_new_tokens = max_new_tokens or found.get("rollout", "max_new_tokens", LONGEST)
        self.tokenizer = ChatTokenizer(
            found.folder,
            found.get("data", "template", "chat"),
            template_args=found.get("data", "template_args", {}),
            **trusts,
        )
        stops = Stops(self.tokenizer, found.get("rollout", "stop", []), found.get("rollout", "stop_token_ids", []))
        self.positions = max_positions(found.base, trust_remote_code=trust_remote_code)
        given = temperature if temperature is not None else found.get("rollout", "temperature", 1.0)
        self.engine = HfEngine(
            EngineConfig(
                model_path=found.base,
                temperature=given,
                max_model_len=self.positions or 2**20,
                stop_token_ids=stops.token_ids,
                stop_strings=stops.strings,
                dtype=found.get("model", "dtype", "bfloat16" if torch.cuda.is_available() else "float32"),
                trust_remote_code=trust_remote_code,
            )
        )
        if found.base != found.folder:
            self.engine.model = load_adapter(self.engine.model, found.folder).merge_and_unload().eval()

    async def reply(self, messages: list[Message], seeds: list[int]) -> list[str]:
        """Return one reply per seed. Raises UserError for a conversation that is too long for the model."""
        if self.system and not any(m["role"] == "system" for m in messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        ids = self.tokenizer.render(messages)
        room = self.max_new_tokens if self.positions is None else min(self.max_new_tokens, self.positions - len(ids))
        if room < 1:
            raise UserError(f"the conversation has {len(ids)} tokens, and the model has room for {self.positions}")
        done = await asyncio.gather(*(self.engine.generate(ids, max_new_tokens=room, seed=seed) for seed in seeds))
        return [self.tokenizer.decode(completion.token_ids) for completion in done]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that both programs have."""
    parser.add_argument(
        "model", metavar="MODEL", help="a run, model, adapter or checkpoint folder, or a name on the hub"
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: that of the run, or 1)")
    parser.add_argument("--max-new-tokens", type=int, help=f"default: that of the run, or {LONGEST}")
    parser.add_argument("--system", help="system turn (default: that of the run)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def open_speaker(args: argparse.Namespace) -> Speaker:
    """Load the model that the arguments name. Raises UserError for what cannot be."""
    if args.temperature and not 0.01 <= args.temperature <= 100:
        raise UserError(f"--temperature={args.temperature:g} must be 0, which is greedy, or from 0.01 to 100")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens={args.max_new_tokens} must be 1 or more")
    return Speaker(
        find_model(args.model, trust_remote_code=args.trust_remote_code),
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        system=args.system,
        trust_remote_code=args.trust_remote_code,
    )


def run_tool(main: Callable[[], None]) -> NoReturn:
    """Run a program to its end, and exit as main_rl.py does."""

    def run() -> int:
        main()
        return 0

    sys.exit(run_guarded(run))
