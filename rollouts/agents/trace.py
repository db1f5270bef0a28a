"""An agent's conversations as a tree: what each request told the policy, and what was sampled for it, token for token.

A node is one reply. Its tokens are those that were given since the reply before it, and those that were sampled. A
request continues the deepest reply whose conversation it repeats; whatever else it holds begins a branch of its own,
from a full render. Every path from a root to a leaf is a sample:

    root: system, user -> reply 0 ── tool -> reply 1 ── tool -> reply 2          samples: 0 1 2
                                  └─ user -> reply 3                                      0'  3
    root: system, summary -> reply 4                                                      4

Reply 0 is trained on in the first of them only. In the others (0') its tokens are context. A reply that the harness
did not repeat literally is context too: it is rendered as it stands in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.types.images import PlacedImage
from core.types.messages import Message, ToolSpec
from core.types.samples import Stop
from data_feeds.chat.template_append import TemplateRefuses, TemplateRewrites
from rollouts.engines.base import Completion
from rollouts.transcript import PlacesImages, find_places


class Renderer(PlacesImages, Protocol):
    """Methods of a tokenizer that a trace needs; see data_feeds/chat/tokenizer.py."""

    def render(self, messages: list[Message], tools: Sequence[ToolSpec] = ()) -> list[int]: ...
    def render_turns(self, reply: Message, answers: list[Message], tools: Sequence[ToolSpec] = ()) -> list[int]: ...


class CannotContinue(Exception):
    """Reason why no reply can follow the messages of a request, in a sentence."""


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """Reply of the policy, with the messages and tokens that came before it since its parent's reply."""

    parent: Node | None
    tools: list[ToolSpec]
    """Tools of the branch."""
    prompt_messages: list[Message]
    prompt_ids: list[int]
    images: tuple[PlacedImage, ...]
    """Images of all tokens before the reply."""
    reply: Message
    completion: Completion
    number: int
    """Number of the reply in its episode, by time."""
    children: list[Node] = field(default_factory=list["Node"])
    is_kept: bool = False
    """Whether the harness got this reply, or one after it. One that it never saw had no effect."""
    refused: Stop | None = None
    """Limit that kept the branch from going on after this reply."""

    def list_path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def keep(self) -> None:
        """Note that the harness got this reply, and so those before it."""
        for node in self.list_path():
            node.is_kept = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Request that the engine is about to answer."""

    parent: Node | None
    """Reply that it continues; None where a branch begins."""
    tools: list[ToolSpec]
    prompt_messages: list[Message]
    prompt_ids: list[int]
    """Tokens since the parent's reply."""
    context: list[int]
    """All tokens that the engine gets."""
    images: tuple[PlacedImage, ...]
    """Images that some of these stand for."""
    depth: int
    """Number of the assistant's messages after those of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Path from a root to a leaf. The lists have one length."""

    ids: list[int]
    action_mask: list[bool]
    logp: list[float]
    versions: list[int]
    turns: tuple[tuple[int, int], ...]
    """Token spans of the replies that are trained on here."""
    turn_numbers: tuple[int, ...]
    """Their numbers in the episode."""
    stop: Stop
    messages: list[Message]
    last: int
    """Number of its last reply."""
    images: tuple[PlacedImage, ...]


class Trace:
    """Conversations of one episode. It renders and records; sampling is the caller's."""

    def __init__(self, tokenizer: Renderer, close_turn: Callable[[list[int]], list[int]], prompt: Sequence[Message]):
        """close_turn: the tokens that end a reply's turn, where the policy did not sample them; see rollouts/stops.py.

        prompt: messages of the data set, whose assistant's turns nobody has rewritten.
        """
        self.tokenizer, self.close_turn = tokenizer, close_turn
        self.prompt = list(prompt)
        self.roots: list[Node] = []
        self.writes_tools = False
        """Whether the chat template was seen to write tools."""
        self.n_replies = 0
        self.n_repeated = 0
        """Assistant's messages in requests that stand there as the tokens that were sampled."""
        self.n_rewritten = 0
        """Assistant's messages in requests that were rendered from text: rewritten, inserted or moved by harness."""
        self.n_not_appended = 0
        """Requests that began a branch only because the chat template writes earlier turns differently."""

    def plan_reply(self, messages: list[Message], tools: list[ToolSpec]) -> Planned:
        """Return what the engine gets for a request.

        Raises CannotContinue for messages after which no reply can come, and TemplateRefuses.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise CannotContinue(
                "the last message must be the user's, the system's or a tool's: a reply of the assistant's is not "
                "continued"
            )
        parent = self._find_parent(messages, tools)
        planned = None if parent is None else self._append(parent, messages)
        if planned is None:
            given = self._render(messages, tools)
            planned = Planned(
                parent=None,
                tools=tools,
                prompt_messages=messages,
                prompt_ids=given,
                context=given,
                images=find_places(self.tokenizer, given, messages),
                depth=self._count_replies(messages),
            )
        return planned

    def add_reply(self, planned: Planned, done: Completion, reply: Message) -> Node:
        """Record what was sampled for a request, and the message that the harness gets for it."""
        node = Node(
            parent=planned.parent,
            tools=planned.tools,
            prompt_messages=planned.prompt_messages,
            prompt_ids=planned.prompt_ids,
            images=planned.images,
            reply=reply,
            completion=done,
            number=self.n_replies,
        )
        self.n_replies += 1
        repeated = 0 if planned.parent is None else len(planned.parent.list_path())
        self.n_repeated += repeated
        self.n_rewritten += planned.depth - repeated
        (self.roots if planned.parent is None else planned.parent.children).append(node)
        return node

    def starts_with_prompt(self, planned: Planned) -> bool:
        """Tell whether a request's conversation begins with the messages of the prompt."""
        return self.holds_prompt(
            planned.prompt_messages if planned.parent is None else planned.parent.list_path()[0].prompt_messages
        )

    def holds_prompt(self, messages: list[Message]) -> bool:
        """Tell whether a conversation begins with the messages of the prompt."""
        return messages[: len(self.prompt)] == self.prompt

    def list_branches(self) -> list[Branch]:
        """Return every path from a root to a leaf; a reply of several is sampled in the first that holds it."""
        seen: set[int] = set()
        return [_make_branch(leaf, seen) for leaf in _list_leaves(self.roots)]

    def _render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        given = self.tokenizer.render(messages, tools)
        if tools and not self.writes_tools:
            self.writes_tools = given != self.tokenizer.render(messages)
            if not self.writes_tools:
                raise CannotContinue(
                    "the model's chat template does not write tools, so the policy would not see them: leave tools "
                    "out, and describe them in a message"
                )
        return given

    def _find_parent(self, messages: list[Message], tools: list[ToolSpec]) -> Node | None:
        """Return the deepest reply whose conversation the messages repeat; the latest where there are several."""
        best: tuple[int, int] = (0, -1)
        found: Node | None = None
        waiting = [(node, 0) for node in self.roots if node.tools == tools]
        while waiting:
            node, start = waiting.pop()
            at = start + len(node.prompt_messages)
            if (
                messages[start:at] != node.prompt_messages
                or at >= len(messages)
                or not is_repeated(node.reply, messages[at])
            ):
                continue
            if (at, node.number) > best:
                best, found = (at, node.number), node
            waiting += [(child, at + 1) for child in node.children]
        return found

    def _append(self, parent: Node, messages: list[Message]) -> Planned | None:
        """Return a request that continues `parent`; None where the template does not only append."""
        path = parent.list_path()
        at = sum(len(node.prompt_messages) + 1 for node in path)
        before = [i for node in path for i in (*node.prompt_ids, *node.completion.token_ids)]
        try:
            answers = self.tokenizer.render_turns(parent.reply, messages[at:], parent.tools)
            given = self.close_turn(parent.completion.token_ids) + answers
            images = find_places(self.tokenizer, before + given, messages[at:], len(before))
        except (TemplateRewrites, TemplateRefuses):  # what the template refuses in the whole, the full render says
            self.n_not_appended += 1
            return None
        return Planned(
            parent=parent,
            tools=parent.tools,
            prompt_messages=messages[at:],
            prompt_ids=given,
            context=before + given,
            images=parent.images + images,
            depth=self._count_replies(messages),
        )

    def _count_replies(self, messages: list[Message]) -> int:
        after = messages[len(self.prompt) :] if self.holds_prompt(messages) else messages
        return sum(message["role"] == "assistant" for message in after)


def is_repeated(reply: Message, message: Message) -> bool:
    """Tell whether a message of a request is this reply: harnesses trim its text, and most leave its reasoning out.

    >>> said = {"role": "assistant", "content": " 7 ", "reasoning": "3+4"}
    >>> is_repeated(said, {"role": "assistant", "content": "7"}), is_repeated(said, {"role": "user", "content": "7"})
    (True, False)
    """
    thought = message.get("reasoning")
    return (
        message["role"] == "assistant"
        and message["content"].strip() == reply["content"].strip()
        and message.get("tool_calls", []) == reply.get("tool_calls", [])
        and (thought is None or thought.strip() == reply.get("reasoning", "").strip())
    )


def _list_leaves(roots: list[Node]) -> Iterator[Node]:
    """Yield the leaves of the tree in the order of their branches, without replies that nobody got."""
    waiting = [root for root in reversed(roots) if root.is_kept]
    while waiting:
        node = waiting.pop()
        children = [child for child in reversed(node.children) if child.is_kept]
        waiting += children
        if not children:
            yield node


def _make_branch(leaf: Node, seen: set[int]) -> Branch:
    """Return the path to a leaf. The replies in `seen` are context; those that are new are added to it."""
    path = leaf.list_path()
    columns: dict[str, list[Any]] = {name: [] for name in ("ids", "action_mask", "logp", "versions")}
    turns: list[tuple[int, int]] = []
    numbers: list[int] = []

    def append(ids: list[int], logp: list[float], versions: list[int], *, sampled: bool) -> None:
        columns["ids"] += ids
        columns["action_mask"] += [sampled] * len(ids)
        columns["logp"] += logp if sampled else [0.0] * len(ids)
        columns["versions"] += versions if sampled else [-1] * len(ids)

    for node in path:
        done, is_new = node.completion, node.number not in seen
        append(node.prompt_ids, [], [], sampled=False)
        begin = len(columns["ids"])
        append(done.token_ids, done.logp, done.versions, sampled=is_new)
        if is_new:
            turns.append((begin, len(columns["ids"])))
            numbers.append(node.number)
            seen.add(node.number)
    return Branch(
        ids=columns["ids"],
        action_mask=columns["action_mask"],
        logp=columns["logp"],
        versions=columns["versions"],
        turns=tuple(turns),
        turn_numbers=tuple(numbers),
        stop=leaf.refused or leaf.completion.stop,
        messages=[message for node in path for message in (*node.prompt_messages, node.reply)],
        last=leaf.number,
        images=leaf.images,
    )
