"""Turn of the policy, and the episode of a single one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from core.errors import UserError
from core.types.images import as_argument
from core.types.messages import Message, ToolSpec, name_of_tool
from core.types.samples import Prompt, Sample
from data_feeds.chat.tool_parsing import ParsedReply, PlainParser, ReplyParser, rename_taken
from rollouts.engines.base import Completion, Engine
from rollouts.stops import Stops
from rollouts.transcript import Tokenizer, Transcript, check_completion

Entering = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """Limits of an episode, with the parser and stops of replies."""

    seed_of_turn: Callable[[int], int]
    """Returns the sampling seed of a turn."""
    max_new_tokens: int
    """Token budget of all turns of a player, environment messages included."""
    max_turns: int
    """Maximum number of replies, over all players."""
    timeout_s: float
    """Maximum time for which the environment may block the event loop, in seconds."""
    max_prompt_tokens: int | None = None
    """Maximum number of tokens before the first reply. None: unlimited."""
    stops: Stops | None = None
    """Stop strings and stop tokens of the recipe."""
    parser: ReplyParser = field(default_factory=PlainParser)
    """Parser of replies."""
    is_truncated: bool = False
    """True if completions must report kept sets."""
    is_routed: bool = False
    """True if completions must report routes."""
    in_environment: Entering = nullcontext
    """Context manager entered while the policy waits for the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Player's part of an episode, before the reward."""

    sample: Sample
    messages: list[Message]
    """Messages after the prompt."""
    turn_scores: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Environment scores of each reply. [] if the environment has no scores per turn."""

    def fail(self, failure: str) -> Played:
        """Return a failed copy without scores."""
        sample = self.sample.replace(failure=self.sample.failure or failure, reward_parts={})
        return Played(sample=sample, messages=self.messages)


async def run_single_turns(
    engine: Engine, prompt: Prompt, tokenizer: Tokenizer, rules: EpisodeRules, *, size: int
) -> list[Played]:
    """Run `size` episodes without an environment, of one reply each, and sample the replies together.

    Each sample is that of `run_episode` with SingleTurn. Raises UserError for a prompt that is too long, and RunStopped
    for an invalid completion.
    """
    first = begin_transcript(prompt, [], [], tokenizer, rules)
    seed, seen = rules.seed_of_turn(0), as_argument(first.images)
    replies = await engine.generate_group(first.ids, size=size, max_new_tokens=first.tokens_left, seed=seed, **seen)
    played: list[Played] = []
    for done in replies:
        script = first.copy()
        append_reply(script, done, tokenizer, rules, is_routed=rules.is_routed)
        counts = {"turns": 1.0} if rules.max_turns > 1 else {}
        sample = script.make_player_sample(tokenizer, player=0, parts={}, counts=counts, failure="")
        played.append(Played(sample=sample, messages=script.messages))
    return played


def begin_transcript(
    prompt: Prompt, given: list[Message], of_env: Sequence[ToolSpec], tokenizer: Tokenizer, rules: EpisodeRules
) -> Transcript:
    """Return the transcript of a player before the first reply. given, of_env: messages and tools of the environment.

    Raises UserError if the prompt is too long with them.
    """
    tools = join_tools(prompt, of_env, rules.parser)
    # the sample's prompt is the one that the player saw
    if given or tools != prompt.tools:
        prompt = replace(prompt, messages=[*prompt.messages, *given], tools=tools)
    ids = tokenizer.render(prompt.messages, tools)
    limit = rules.max_prompt_tokens
    if limit is not None and len(ids) > limit:
        raise UserError(
            f"data.max_prompt_tokens={limit}: the prompt {prompt.id} has {len(ids)} tokens with what the "
            "environment adds to it (tools, first messages): raise data.max_prompt_tokens"
        )
    script = Transcript(prompt=prompt, tokens_left=rules.max_new_tokens)
    script.append_given(tokenizer, ids, prompt.messages)
    return script


async def sample_reply(
    engine: Engine, script: Transcript, tokenizer: Tokenizer, rules: EpisodeRules, *, seed: int, is_routed: bool
) -> ParsedReply:
    """Sample a reply, and append it to the transcript. is_routed: whether the engine must report routes.

    Raises RunStopped for an invalid completion.
    """
    seen = as_argument(script.images)
    done = await engine.generate(script.ids, max_new_tokens=script.tokens_left, seed=seed, **seen)
    return append_reply(script, done, tokenizer, rules, is_routed=is_routed)


def append_reply(
    script: Transcript, done: Completion, tokenizer: Tokenizer, rules: EpisodeRules, *, is_routed: bool
) -> ParsedReply:
    """Append a completion to the transcript. Return it as a message. Raises RunStopped for an invalid completion.

    It is decoded for environment and reward, and never encoded again: encode(decode(ids)) may differ from ids.
    """
    check_completion(
        done,
        max_new_tokens=script.tokens_left,
        is_truncated=rules.is_truncated,
        routed=len(script.ids) if is_routed else None,
    )
    if rules.stops is not None:
        rules.stops.check_completion(done.token_ids, done.stop)
    script.append_sampled(done)
    script.stop = done.stop
    script.last_text = tokenizer.decode(done.token_ids)
    reply = rules.parser.parse(done.token_ids, script.last_text, script.prompt.tools)
    if "tool_calls" in reply.message:
        before = [*script.prompt.messages, *script.messages]
        reply = replace(reply, message=rename_taken(reply.message, before))
    script.messages.append(reply.message)
    return reply


def join_tools(prompt: Prompt, of_env: Sequence[ToolSpec], parser: ReplyParser) -> list[ToolSpec]:
    """Return the tools of row and environment. Raises UserError for duplicates, or without a tool parser."""
    tools = [*prompt.tools, *of_env]
    known = [name_of_tool(spec) for spec in tools]
    if twice := [name for name in known if known.count(name) > 1]:
        raise UserError(f"the row {prompt.id} and rollout.env both have a tool {twice[0]}: rename one of them")
    if tools and isinstance(parser, PlainParser):
        raise UserError(
            "rollout.tool_parser is unset, the environment has tools, and the tokenizer has no response template: "
            "nothing would read the calls; name the form in which the model writes them (hermes, llama3_json, ...)"
        )
    return tools
