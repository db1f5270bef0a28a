"""Plain text of a sample for the terminal: prompt, completion and reward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from core.text.plain_text import escape_controls, shorten_middle
from core.types.samples import Group
from driver.records.sample_files import make_sample_record

LONGEST_PROMPT, LONGEST_COMPLETION = 400, 800
"""Characters."""


def make_record(step: int, groups: list[Group]) -> dict[str, Any]:
    """Return the record of a sample to show. Other steps show other samples."""
    # Derived from the step instead of drawn: a repeated run shows the same samples.
    group = step % len(groups)
    i = step // len(groups) % len(groups[group])
    return make_sample_record(groups[group][i], group)


def write_sample(step: int, record: dict[str, Any]) -> str:
    """Return the lines of a sample. Lines of prompt and completion are marked, so that none looks like our output.

    >>> record = {"group": 1, "reward": 0.5, "reward_parts": {"correct": 0.5}, "stop": "eos", "completion": "7"}
    >>> print(write_sample(3, record | {"prompt": [{"role": "user", "content": "3+4="}]}))
    sample of step 3, group 1: reward 0.5 (correct 0.5), stop: eos
      | user: 3+4=
      > 7
    """
    reward = f"no reward ({record['failure']})" if record["reward"] is None else f"reward {record['reward']:.4g}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in record["reward_parts"].items())
    head = f"sample of step {step}, group {record['group']}: {reward}" + (f" ({parts})" if parts else "")
    prompt = join_messages(record["prompt"])
    return "\n".join(
        [
            # Line ends too: a failure's text must not begin a line that looks like one of ours.
            escape_controls(f"{head}, stop: {record['stop']}", keep=""),
            *mark_lines("  | ", shorten_middle(prompt, LONGEST_PROMPT)),
            *_write_completion(record),
        ]
    )


def write_message(message: Mapping[str, Any]) -> str:
    """Format a message as text, with reasoning and tool calls.

    >>> call = {"function": {"name": "add", "arguments": {"a": 1}}}
    >>> write_message({"role": "assistant", "content": "", "tool_calls": [call]})
    'assistant: add({"a": 1})'
    """
    calls = [call["function"] for call in message.get("tool_calls", [])]
    said = [
        f"({message['reasoning']})" if message.get("reasoning") else "",
        write_content(message),
        *(f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls),
    ]
    return f"{message['role']}: " + "\n".join(filter(None, said))


def write_content(message: Mapping[str, Any]) -> str:
    """Format a message's content as text, with images as size and start of the hash.

    >>> image = {"type": "image", "sha256": "3fa985b71c", "width": 56, "height": 40}
    >>> write_content({"content": "How many?", "parts": [image, {"type": "text", "text": "How many?"}]})
    '[image 56 x 40, 3fa985b7] How many?'
    """
    if "parts" not in message:
        return message["content"]
    return " ".join(
        part["text"] if part["type"] == "text" else f"[image {part['width']} x {part['height']}, {part['sha256'][:8]}]"
        for part in message["parts"]
    )


def _write_completion(record: dict[str, Any]) -> list[str]:
    """Return the lines after the prompt: the policy's marked by >, the environment's by |."""
    if "turns" not in record:
        return mark_lines("  > ", shorten_middle(record["completion"], LONGEST_COMPLETION))
    share = max(LONGEST_COMPLETION // len(record["turns"]), 80)
    return [
        line
        for turn in record["turns"]
        for line in mark_lines(
            "  > " if turn["role"] == "assistant" else "  | ", shorten_middle(write_message(turn), share)
        )
    ]


def join_messages(messages: Iterable[Mapping[str, Any]]) -> str:
    r"""Format messages as text, each after its role.

    >>> join_messages([{"role": "system", "content": "be brief"}, {"role": "user", "content": "3+4="}])
    'system: be brief\nuser: 3+4='
    """
    return "\n".join(map(write_message, messages))


def mark_lines(mark: str, text: str) -> list[str]:
    return [mark + line for line in escape_controls(text).split("\n")]
