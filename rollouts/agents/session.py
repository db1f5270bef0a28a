"""Session of an agent's episode: requests, limits, seeds, and the trace of sampled tokens."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from core.timing.clock import ActivityTimer
from core.timing.deadlines import AGENT_REQUEST_TIMEOUT_S
from core.timing.phases import Activity
from core.types.images import as_argument
from core.types.messages import Message, ToolSpec, find_images
from core.types.samples import Prompt, Stop
from core.types.truncation import EVERYTHING_KEPT, Truncation
from data_feeds.chat.template_append import TemplateRefuses
from data_feeds.chat.tool_parsing import HarmonyParser, PlainParser, ReplyParser, rename_taken, say_deaf
from rollouts.agents.trace import CannotContinue, Node, Planned, Trace
from rollouts.agents.wire import LIMIT_CODES, BadRequest, ChatRequest, ChatResponse, refuse_slow
from rollouts.engines.base import Completion, Engine
from rollouts.stops import Stops, StopStrings
from rollouts.transcript import Tokenizer, check_completion

T = TypeVar("T")
AT_ONCE = 64
"""Maximum number of concurrent requests per episode. Further requests are refused."""
AT_ONCE_READ = 4
"""Maximum number of requests of an episode that are received and parsed at once. Each may be large."""
MAX_REFUSED = 200
"""Maximum number of refused requests per episode. With more, the episode fails."""


_THREADS = ThreadPoolExecutor(4, thread_name_prefix="requests of agents")
"""Threads that parse and render. In the event loop, one large request would delay every other episode."""


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread of _THREADS."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


class AgentTokenizer(Tokenizer, Protocol):
    """Tokenizer methods for an agent's episode; see data_feeds/chat/tokenizer.py."""

    def bound_tokens(self, messages: list[Message], *, limit: int, tools: Sequence[ToolSpec] = ()) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Engine and settings for sampling, shared by all episodes of a worker."""

    engine: Engine
    tokenizer: AgentTokenizer
    stops: Stops
    parser: ReplyParser
    timer: ActivityTimer
    temperature: float
    max_new_tokens: int
    max_turns: int
    max_model_len: int
    """Maximum length of prompt and completion together, in tokens."""
    truncation: Truncation = EVERYTHING_KEPT
    """Truncation of the run, with which completions report kept sets."""
    is_routed: bool = False
    """True if completions must report routes."""


@dataclass(eq=False, slots=True)
class _Call:
    """Running or finished request, shared with retries of it."""

    task: asyncio.Task[tuple[ChatResponse, Node]]
    listeners: int = 0
    """Number of connections waiting for the response."""
    was_delivered: bool = False


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of unusual requests in an episode, for metrics."""

    refused: int = 0
    must_call: int = 0
    """Requests with a tool_choice that demands a call."""
    retried: int = 0
    sampled: int = 0
    """Tokens sampled by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Chat request with transport data."""

    ask: ChatRequest
    digest: str
    """SHA-256 of the body, as hex."""
    retry: int | None = None
    """Retry count from the client's header, or None without the header."""


class AgentSession:
    """Requests of one episode.

    `failed` resolves to the sentence why the episode fails, or to an error that must end the run.
    """

    def __init__(self, sampler: Sampler, prompt: Prompt, seed_of_turn: Callable[[int | str], int]):
        """seed_of_turn: see `_choose_seed`."""
        self.sampler, self.prompt, self.seed_of_turn = sampler, prompt, seed_of_turn
        self.id, self.key = secrets.token_hex(8), f"feynrl-{secrets.token_urlsafe(32)}"
        self.trace = Trace(sampler.tokenizer, sampler.stops.close_turn, prompt.messages)
        self.left = sampler.max_new_tokens
        self.n_started = 0
        self.counts = Counts()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.timer = ActivityTimer(Activity.GENERATE)
        """Seconds in which the policy was sampling for this episode, and was idle."""
        self._calls: dict[str, _Call] = {}
        self._running: set[asyncio.Task[tuple[ChatResponse, Node]]] = set()
        self._contexts: Counter[str] = Counter()
        self.reading, self._planning = asyncio.Semaphore(AT_ONCE_READ), asyncio.Lock()
        self._main: dict[int, str] = {}
        """Context hashes of the conversation that begins with the prompt, by number of earlier replies."""

    @asynccontextmanager
    async def answering(self, request: Request) -> AsyncGenerator[ChatResponse]:
        """Yield the response to a request. If the body ends without an error, the response counts as delivered."""
        call = self._find_call(request) or self._start_call(request)
        call.listeners += 1
        try:
            await asyncio.wait([call.task])  # not awaited directly: a closed connection must not cancel the sampling
            answer, node = _get_result(call.task)
            yield answer
            call.was_delivered = True
            node.keep()
        finally:
            call.listeners -= 1

    def count_refusal(self, why: str) -> None:
        """Count a refused request. The episode fails after MAX_REFUSED of them."""
        self.counts.refused += 1
        if self.counts.refused >= MAX_REFUSED and not self.failed.done():
            self.failed.set_result(
                f"the agent has made {MAX_REFUSED} requests that were refused, the last because: {why}"
            )

    async def close(self) -> None:
        """Cancel running requests."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self.failed.cancel()  # also marks an error as retrieved, or asyncio would log a warning

    def _find_call(self, request: Request) -> _Call | None:
        """Return the earlier request that this request retries, or None."""
        call = self._calls.get(request.digest)
        # Two requests with the same body may be two samples of one prompt. retry 0: the client says that it is new.
        # retry above 0: a retry. None: no header, so it is a retry only if the earlier response reached nobody.
        if call is None or request.retry == 0:
            return None
        is_repeated = request.retry is not None or (not call.listeners and not call.was_delivered)
        self.counts.retried += is_repeated
        return call if is_repeated else None

    def _start_call(self, request: Request) -> _Call:
        if len(self._running) >= AT_ONCE:
            raise BadRequest(
                f"{AT_ONCE} requests of this episode are running, and more are not taken at once: await some first",
                status=429,
            )
        task = asyncio.create_task(self._reply(request.ask))
        self._running.add(task)
        task.add_done_callback(self._end_call)
        # replaces an earlier call with the same body: a retry is one of the latest request
        call = self._calls[request.digest] = _Call(task)
        return call

    def _end_call(self, task: asyncio.Task[tuple[ChatResponse, Node]]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, BadRequest) and not self.failed.done():
            self.failed.set_exception(error)  # an engine error or a bug, which must end the run

    async def _reply(self, ask: ChatRequest) -> tuple[ChatResponse, Node]:
        self.counts.must_call += ask.must_call
        # without a parser a call would be returned as text, and no tool would run
        if ask.tools and (why := say_deaf(self.sampler.parser)):
            raise BadRequest(why, param="tools")
        if self.sampler.tokenizer.images is None and find_images(ask.messages):
            raise BadRequest("the policy is a language model, which sees no images: leave them out", param="messages")
        try:
            # one after the other, in the order of arrival, on which seeds depend
            async with asyncio.timeout(AGENT_REQUEST_TIMEOUT_S), self._planning:
                planned = await run_in_thread(partial(self._plan, ask))
        except TimeoutError as error:
            raise refuse_slow() from error
        except CannotContinue as error:
            raise BadRequest(str(error), param="messages") from error
        except TemplateRefuses as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        room = self._measure_room(planned)
        # before sampling, so that concurrent requests count
        self.n_started += 1
        wanted = room if ask.max_tokens is None else min(room, ask.max_tokens)
        done = await self._sample(planned, wanted)
        # before the trace: tokens behind the stop would be trained on, and the harness never sees them
        done = cut_at_stop(done, ask.stop, self.sampler)
        # the budget counts tokens of tool results too, as an environment's episode does
        self.left -= len(done.token_ids) + (0 if planned.parent is None else len(planned.prompt_ids))
        reply, stop_string = self._parse(done, ask)
        node = self.trace.add_reply(planned, done, reply)
        reason = "length" if done.stop == "length" else "tool_calls" if "tool_calls" in reply else "stop"
        answer = ChatResponse(
            id=f"{self.id}-{node.number}",
            message=reply,
            finish_reason=reason,
            prompt_tokens=len(planned.context),
            completion_tokens=len(done.token_ids),
            stop_string=stop_string,
        )
        return answer, node

    def _plan(self, ask: ChatRequest) -> Planned:
        """Plan the reply to a request. Raises BadRequest for one that is far too long, before all of it is rendered."""
        limit = self.sampler.max_model_len
        # every message has at least a token
        too_many = len(ask.messages) > limit
        if too_many or self.sampler.tokenizer.bound_tokens(ask.messages, limit=limit, tools=ask.tools) is not None:
            what = f"{len(ask.messages)} messages" if too_many else f"more than {limit} tokens"
            raise self._end_branch(self.trace.find_parent(ask.messages, ask.tools), "length", self._say_too_long(what))
        return self.trace.plan_reply(ask.messages, ask.tools)

    def _say_too_long(self, what: str) -> str:
        return (
            f"the conversation has {what}, and with a reply it may have "
            f"data.max_prompt_tokens + rollout.max_new_tokens={self.sampler.max_model_len}: shorten it, or raise them"
        )

    def _measure_room(self, planned: Planned) -> int:
        """Return the maximum number of tokens for the reply. Raises BadRequest if a limit is reached."""
        sampler = self.sampler
        if self.n_started >= sampler.max_turns:
            raise self._end_branch(
                planned.parent,
                "turns",
                f"the episode has had rollout.max_turns={sampler.max_turns} replies: end it, or raise that key",
            )
        if planned.parent is None and len(planned.context) >= sampler.max_model_len:
            raise self._end_branch(None, "length", self._say_too_long(f"{len(planned.context)} tokens"))
        # A new branch starts from a full render, whose tokens are prompt. Only tokens appended to a reply use the
        # budget.
        left = self.left - (0 if planned.parent is None else len(planned.prompt_ids))
        room = min(left, sampler.max_model_len - len(planned.context))
        if room <= 0:
            raise self._end_branch(
                planned.parent,
                "length",
                f"the episode has used up rollout.max_new_tokens={sampler.max_new_tokens}, its budget of sampled and "
                "answered tokens: end it, or raise that key",
            )
        return room

    def _end_branch(self, parent: Node | None, stop: Stop, why: str) -> BadRequest:
        if parent is not None:
            parent.refused = stop
        return BadRequest(why, code=LIMIT_CODES[stop])

    async def _sample(self, planned: Planned, max_new_tokens: int) -> Completion:
        sampler = self.sampler
        seed = self.seed_of_turn(self._choose_seed(planned))
        with sampler.timer.measure(Activity.GENERATE), self.timer.measure(Activity.GENERATE):
            done = await sampler.engine.generate(
                planned.context, max_new_tokens=max_new_tokens, seed=seed, **as_argument(planned.images)
            )
        check_completion(
            done,
            max_new_tokens=max_new_tokens,
            is_truncated=not sampler.truncation.is_off,
            routed=len(planned.context) if sampler.is_routed else None,
        )
        sampler.stops.check_completion(done.token_ids, done.stop)
        self.counts.sampled += len(done.token_ids)
        return done

    def _choose_seed(self, planned: Planned) -> int | str:
        """Return the seed key of a reply. Two replies with the same seed would not be independent.

        In the conversation that begins with the prompt, the key is the number of earlier replies, as in an environment.
        In other branches it is the hash of the context, with the number of earlier requests of the same context.
        """
        # a fixed width, since the hash is of bytes
        context = np.array(planned.context, dtype=np.int64).tobytes()
        digest = hashlib.blake2b(context, digest_size=8).hexdigest()
        # Keyed by content, since an agent's requests may arrive in another order when the run is repeated.
        before, self._contexts[digest] = self._contexts[digest], self._contexts[digest] + 1
        is_main = self.trace.starts_with_prompt(planned) and planned.tools == self.prompt.tools
        if is_main and not before and self._main.setdefault(planned.depth, digest) == digest:
            return planned.depth
        return f"{planned.depth}/{digest}/{before}"

    def _parse(self, done: Completion, ask: ChatRequest) -> tuple[Message, str | None]:
        """Return the reply as a message, cut at the request's first stop string, and that string."""
        sampler = self.sampler
        offered = ask.tools if ask.may_call else []
        # without tools a reply is plain text, but one in channels has its thoughts in a channel all the same
        parser = sampler.parser if offered or isinstance(sampler.parser, HarmonyParser) else PlainParser()
        text = sampler.tokenizer.decode(done.token_ids)
        reply = rename_taken(parser.parse(done.token_ids, text, offered).message, ask.messages)
        ends = [(at, s) for s in ask.stop if (at := reply["content"].find(s)) >= 0]
        if not ends:
            return reply, None
        at, string = min(ends)
        return {**reply, "content": reply["content"][:at]}, string


def _get_result(task: asyncio.Task[tuple[ChatResponse, Node]]) -> tuple[ChatResponse, Node]:
    """Return the result of a finished request. Raises BadRequest if the request was cancelled or the engine failed."""
    if not task.cancelled() and (task.exception() is None or isinstance(task.exception(), BadRequest)):
        return task.result()
    raise BadRequest("the policy cannot answer any more: the episode, or the run, is ending", status=500)


def cut_at_stop(done: Completion, strings: tuple[str, ...], sampler: Sampler) -> Completion:
    """Cut a completion after the token that completes a stop string.

    The result equals that of an engine that checks for the string after every token. Later tokens had no effect.
    """
    if not strings:
        return done
    stops = StopStrings(strings, sampler.tokenizer.decode, sampler.stops.tokenizer.written_ids)
    end = stops.find_end(done.token_ids)
    if end is None:
        return done
    return done.cut(end)
