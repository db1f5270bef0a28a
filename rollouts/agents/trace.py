"""Trace of an agent's conversations: a tree of replies with their exact tokens.

A node is a reply, with its sampled tokens and the prompt tokens since the parent's reply. A request continues the
deepest reply with the same conversation. Any other request starts a new branch, rendered in full. Every path from root
to leaf is a sample:

    root: system, user -> reply 0 ── tool -> reply 1 ── tool -> reply 2          samples: 0 1 2
                                  └─ user -> reply 3                                      0'  3
    root: system, summary -> reply 4                                                      4

Reply 0 is trained on only in the first sample. In other samples (0') it is context. A reply that the harness changed is
also context, rendered as the request states it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from core.types.images import PlacedImage
from core.types.messages import Message, ToolSpec
from core.types.samples import Stop
from data_feeds.chat.template_append import TemplateRefuses, TemplateRewrites
from rollouts.engines.base import Completion
from rollouts.stops import join_turn
from rollouts.transcript import Conversation, Tokenizer, find_places


class CannotContinue(Exception):
    """Reason why no reply can follow a request's messages, as a sentence."""


# eq=False: nodes refer to each other, so a comparison by value could recurse without end.
@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """Reply of the policy, with the messages and tokens since the parent's reply."""

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
    """Number of the reply in the episode, in sampling order."""
    children: list[Node] = field(default_factory=list["Node"])
    is_kept: bool = False
    """True if the harness received this reply or a later one. An undelivered reply had no effect."""
    refused: Stop | None = None
    """Limit that ended the branch after this reply."""

    def list_path(self) -> list[Node]:
        """Return the nodes from the root to this node."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def keep(self) -> None:
        """Mark this reply and its ancestors as received by the harness."""
        for node in self.list_path():
            node.is_kept = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Request ready for the engine."""

    parent: Node | None
    """Reply that the request continues, or None for a new branch."""
    tools: list[ToolSpec]
    prompt_messages: list[Message]
    prompt_ids: list[int]
    """Tokens since the parent's reply."""
    context: list[int]
    """All tokens before the reply: the engine's input."""
    images: tuple[PlacedImage, ...]
    """Images of the context."""
    depth: int
    """Number of assistant turns after the prompt."""


@dataclass(kw_only=True)
class Branch(Conversation):
    """Path from a root to a leaf."""

    turn_numbers: list[int] = field(default_factory=list[int])
    """Numbers of the trained replies in the episode."""
    last: int
    """Number of the last reply."""
    tools: list[ToolSpec]
    """Tools that the harness sent, which the policy saw."""


class Trace:
    """Conversations of one episode. The caller samples; the trace renders and records."""

    def __init__(self, tokenizer: Tokenizer, close_turn: Callable[[list[int]], list[int]], prompt: Sequence[Message]):
        """close_turn: returns tokens that end a reply's turn if the policy did not sample them; see rollouts/stops.py.

        prompt: messages of the row. Their assistant turns do not count as rewritten.
        """
        self.tokenizer, self.close_turn = tokenizer, close_turn
        self.prompt = list(prompt)
        self.roots: list[Node] = []
        self.writes_tools = False
        """True once the chat template has rendered tools."""
        self.n_replies = 0
        self.n_repeated = 0
        """Assistant turns in requests that keep their sampled tokens."""
        self.n_rewritten = 0
        """Assistant turns in requests that were rendered from text: rewritten, inserted or moved by the harness."""
        self.n_not_appended = 0
        """Requests that started a branch only because the chat template changes earlier turns."""

    def plan_reply(self, messages: list[Message], tools: list[ToolSpec]) -> Planned:
        """Return the engine's input for a request.

        Raises CannotContinue if no reply can follow the messages, and TemplateRefuses.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise CannotContinue(
                "the last message must be the user's, the system's or a tool's: a reply of the assistant's is not "
                "continued"
            )
        parent = self.find_parent(messages, tools)
        planned = None if parent is None else self._append(parent, messages)
        if planned is None:
            # a new branch, rendered in full
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
        """Record a sampled completion, and the reply message sent to the harness."""
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
        # every reply on the path keeps its sampled tokens
        repeated = 0 if planned.parent is None else len(planned.parent.list_path())
        self.n_repeated += repeated
        self.n_rewritten += planned.depth - repeated
        (self.roots if planned.parent is None else planned.parent.children).append(node)
        return node

    def starts_with_prompt(self, planned: Planned) -> bool:
        """Return whether a request's conversation begins with the prompt."""
        return self.holds_prompt(
            planned.prompt_messages if planned.parent is None else planned.parent.list_path()[0].prompt_messages
        )

    def holds_prompt(self, messages: list[Message]) -> bool:
        """Return whether messages begin with the prompt."""
        return messages[: len(self.prompt)] == self.prompt

    def list_branches(self) -> list[Branch]:
        """Return every path from root to leaf. A reply shared by several paths is trained on in the first."""
        seen: set[int] = set()
        return [_make_branch(leaf, seen) for leaf in _list_leaves(self.roots)]

    def _render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        given = self.tokenizer.render(messages, tools)
        # checked once per episode: a render costs time, and the template does not change
        if tools and not self.writes_tools:
            self.writes_tools = given != self.tokenizer.render(messages)
            if not self.writes_tools:
                raise CannotContinue(
                    "the model's chat template does not write tools, so the policy would not see them: leave tools "
                    "out, and describe them in a message"
                )
        return given

    def find_parent(self, messages: list[Message], tools: list[ToolSpec]) -> Node | None:
        """Return the deepest reply whose conversation the messages repeat. Among equals, return the latest."""
        best: tuple[int, int] = (0, -1)
        found: Node | None = None
        # the template writes tools into the prompt, so other tools mean other tokens
        waiting = [(node, 0) for node in self.roots if node.tools == tools]
        while waiting:
            node, start = waiting.pop()
            at = start + len(node.prompt_messages)
            # the reply itself must be repeated too, so a longer list of messages is needed
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
        """Return a request that continues `parent`, or None if the template changes earlier turns."""
        path = parent.list_path()
        at = sum(len(node.prompt_messages) + 1 for node in path)
        # Sampled tokens, not a render of their text: encoding decoded text can give other tokens.
        before = [i for node in path for i in (*node.prompt_ids, *node.completion.token_ids)]
        try:
            answers = self.tokenizer.render_turns(parent.reply, messages[at:], parent.tools)
            reply = parent.completion.token_ids
            given = join_turn(reply, self.close_turn(reply), answers)
            images = find_places(self.tokenizer, before + given, messages[at:], len(before))
        except (TemplateRewrites, TemplateRefuses):  # a full render follows; it raises if the template refuses that too
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
    """Return whether a request's message is this reply. Harnesses often trim the text and drop the reasoning.

    >>> said = {"role": "assistant", "content": " 7 ", "reasoning": "3+4"}
    >>> is_repeated(said, {"role": "assistant", "content": "7"}), is_repeated(said, {"role": "user", "content": "7"})
    (True, False)
    """
    thought = message.get("reasoning")
    return (
        message["role"] == "assistant"
        and message["content"].strip() == reply["content"].strip()
        and message.get("tool_calls", []) == reply.get("tool_calls", [])
        # a harness may leave the reasoning out, but not change it
        and (thought is None or thought.strip() == reply.get("reasoning", "").strip())
    )


def _list_leaves(roots: list[Node]) -> Iterator[Node]:
    """Yield the leaves in order of their branches, without undelivered replies."""
    # reversed, since a stack returns the last first
    waiting = [root for root in reversed(roots) if root.is_kept]
    while waiting:
        node = waiting.pop()
        children = [child for child in reversed(node.children) if child.is_kept]
        waiting += children
        if not children:
            yield node


def _make_branch(leaf: Node, seen: set[int]) -> Branch:
    """Build the branch of a leaf. Replies in `seen` become context; new replies are added to it."""
    path = leaf.list_path()
    branch = Branch(
        stop=leaf.refused or leaf.completion.stop,
        messages=[message for node in path for message in (*node.prompt_messages, node.reply)],
        last=leaf.number,
        tools=leaf.tools,
        images=leaf.images,
    )
    for node in path:
        branch.append_context(node.prompt_ids)
        # a shared reply is trained on once, or its gradient would be counted in every branch
        if node.number in seen:
            branch.append_context(node.completion.token_ids)
            continue
        branch.append_reply(node.completion)
        branch.turn_numbers.append(node.number)
        seen.add(node.number)
    return branch
