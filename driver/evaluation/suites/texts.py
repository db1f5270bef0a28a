"""Continuations of given tokens by an engine in this process, with ends and temperature of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from core.errors import UserError, quote
from rollouts.engines.base import Engine, EngineConfig
from rollouts.registry import load_engine_class, resolve_engine
from rollouts.stops import Stops, StopTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Request to continue a text, and how far."""

    context: list[int]
    max_new_tokens: int
    seed: int


def choose_engine(name: str, *, tensor_parallel_size: int) -> type[Engine]:
    """Return the engine that runs in this process. Raises UserError where it has no tensor parallelism."""
    engine = load_engine_class(resolve_engine(name))
    if tensor_parallel_size > 1 and not engine.capabilities.tensor_parallel:
        raise UserError(f"the engine {name} runs on one rank: set tensor_parallel_size to 1, or take the engine vllm")
    if engine.capabilities.in_process and tensor_parallel_size == 1 and not torch.cuda.is_available():
        return load_engine_class(resolve_engine(engine.capabilities.in_process))
    return engine


def split_ends(tokenizer: StopTokenizer, ends: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the texts that end a reply, and the special tokens that do: those leave no text.

    Raises UserError for an end that could never be met.
    """
    texts: list[str] = []
    tokens: list[int] = []
    for end in filter(None, ends):
        ids = tokenizer.encode(end)
        if end in tokenizer.decode(ids):
            texts.append(end)
        elif len(ids) == 1:
            tokens += [] if ids[0] in tokenizer.stop_token_ids else ids
        else:
            raise UserError(f"until names {quote(end)}, which is never in the text of a reply: leave it out")
    return texts, tokens


def cut_text(text: str, ends: Sequence[str]) -> str:
    """Return what stands before the ends.

    >>> cut_text("7\\nQ: 1+1", ["Q:", "\\n"])
    '7'
    """
    for end in filter(None, ends):
        text = text.partition(end)[0]
    return text


async def generate_texts(
    engine: type[Engine],
    config: EngineConfig,
    tokenizer: StopTokenizer,
    requests: Sequence[TextRequest],
    *,
    ends: Sequence[str],
    on_text: Callable[[], None] = lambda: None,
) -> list[str]:
    """Start the engine, answer all requests, and close it; the texts stop before the first of `ends`.

    config: without stops. on_text: called after every reply.
    """
    stops = Stops(tokenizer, *split_ends(tokenizer, ends))
    make = engine.begin(config)
    running = make(replace(config, stop_token_ids=stops.token_ids, stop_strings=stops.strings))

    async def answer(request: TextRequest) -> str:
        done = await running.generate(request.context, max_new_tokens=request.max_new_tokens, seed=request.seed)
        on_text()
        return cut_text(tokenizer.decode(done.token_ids), ends)

    try:
        return list(await asyncio.gather(*map(answer, requests)))
    finally:
        await running.close()
