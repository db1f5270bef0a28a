"""Judge worker: an engine whose weights stay as they are, behind an endpoint for the rewards of all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.errors import UserError, quote
from core.loading import FileSpec
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from data_feeds.chat.tokenizer import ChatTokenizer
from rollouts.engines.base import Engine, EngineConfig
from rollouts.judges.endpoint import JudgeEndpoint, Served
from rollouts.registry import load_engine_class


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """Settings of a judge worker."""

    engine_spec: FileSpec
    engine: EngineConfig
    """Engine settings without stop tokens and cores, which the worker's process adds."""
    served: Served
    allowed_tokens: Sequence[str] = ()
    template_args: Mapping[str, Any]
    devices: tuple[str, ...] = ()
    """GPUs of every engine, as CUDA_VISIBLE_DEVICES names them; empty leaves them to Ray."""

    def make_tokenizer(self) -> ChatTokenizer:
        """Load the tokenizer. Raises UserError that names judge.model."""
        trusts = self.engine.trust_remote_code
        path, args = self.engine.model_path, self.template_args
        return ChatTokenizer(path, "chat", key="judge.model", template_args=args, trust_remote_code=trusts)


class JudgeWorker:
    """Owner of one engine of a judge."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, served: Served) -> None:
        self.engine, self._tokenizer, self._served = engine, tokenizer, served
        self._endpoint: JudgeEndpoint | None = None

    async def listen(self, address: str, port: int) -> tuple[str, int]:
        """Serve requests at an address; return the URL and the port. port 0 takes a free one."""
        self._endpoint = JudgeEndpoint(self.engine, self._tokenizer, self._served, address, port)
        await self._endpoint.start()
        return self._endpoint.url, self._endpoint.port

    async def sleep(self) -> None:
        """Wait for requests that nobody reads any more, then put the engine to sleep."""
        if self._endpoint is not None:
            await self._endpoint.wait_until_idle()
        await self.engine.sleep()

    async def wake(self) -> None:
        """Wake the engine with the weights that it had."""
        await self.engine.wake("weights")
        await self.engine.wake("kv_cache")

    async def stay(self, seconds: float) -> None:
        """Return after a while. If this process dies meanwhile, the caller learns of it at once."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close the endpoint and the engine."""
        if self._endpoint is not None:
            await self._endpoint.close()
        await self.engine.close()


def build_judge(plan: JudgePlan, cores: Sequence[int] | None) -> JudgeWorker:
    """Return a judge worker with an engine. cores: CPU cores of the engine."""
    tokenizer = plan.make_tokenizer()
    choices = find_choices(tokenizer, plan.allowed_tokens)
    engine = load_engine_class(plan.engine_spec)(
        replace(
            plan.engine,
            cores=cores,
            stop_token_ids=tokenizer.stop_token_ids,
            allowed_tokens=AllowedTokens(allowed=tuple(sorted(choices))) if choices else EVERY_TOKEN,
        )
    )
    return JudgeWorker(engine, tokenizer, replace(plan.served, choices=choices))


def find_choices(tokenizer: ChatTokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens of judge.allowed_tokens. Raises UserError for a text that is not one token."""
    found: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(
                f"judge.allowed_tokens names {quote(text)}, which is {len(ids)} tokens of the judge's tokenizer: name "
                "single tokens, or leave it out and take another reward.settings.verdict"
            )
        found += ids
    if len({*found}) < len(found):
        raise UserError("judge.allowed_tokens names one token twice: name two that differ, such as [yes, no]")
    return tuple(found)
