"""Chat templates of our own that behave as those of four families do, and a tokenizer of single characters with them.

They have the shape of the originals, and not their words: where tools go, how calls and results are written, what is
left out of history, and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from core.types.messages import Message, ToolCall, ToolSpec
from data_feeds.chat.tokenizer import ChatTokenizer
from data_prep import smollm2

CHATML_TOOLS = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- 'Tools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
)
CHATML_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)"
    " + '\\n</tool_call>' }}"
    "{%- endfor %}"
)
CHATML_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
CHATML_NEXT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
QWEN25 = (
    CHATML_TOOLS + "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}" + CHATML_RESULT + "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + message.content }}" + CHATML_CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}" + CHATML_NEXT
)
"""Joins results in one turn of the user."""
QWEN3 = (
    CHATML_TOOLS + "{%- set asked = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}" + CHATML_RESULT + "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > asked.last and (loop.last or message.reasoning_content) %}"
    "{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content }}" + CHATML_CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}" + CHATML_NEXT
)
"""As above, and with reasoning, which it leaves out of the turns before the last question."""
HERMES = (
    CHATML_TOOLS + "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + message.content }}" + CHATML_CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}" + CHATML_NEXT
)
"""Writes every result as a turn of its own."""
LLAMA3 = (
    "{{- '<|begin|>' }}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once, please') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- '<|header|>assistant<|header_end|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|eot|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|header|>ipython<|header_end|>\\n\\n' + (message.content | tojson) + '<|eot|>' }}"
    "{%- else %}"
    "{{- '<|header|>' + message.role + '<|header_end|>\\n\\n' }}"
    "{%- if tools and message.role == 'user' and loop.index0 < 2 %}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\\n\\n' }}{%- endfor %}{%- endif %}"
    "{{- message.content + '<|eot|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant<|header_end|>\\n\\n' }}{%- endif %}"
)
"""Writes the tools into the first question, one call at most, and no content beside it."""
FAMILIES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "hermes": HERMES, "llama3": LLAMA3, "smollm2": smollm2.TOOL_TEMPLATE}
ENDS = {"llama3": "<|eot|>"}
TOKENS = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|header_end|>", "<|eot|>", "<|python_tag|>"]
ORDINARY = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

WEATHER: ToolSpec = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
ADD: ToolSpec = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, ADD]


def load_family(tiny_path: Any, folder: Path, family: str) -> ChatTokenizer:
    """Return a tokenizer of single characters with the template and the special tokens of a family."""
    hf: Any = AutoTokenizer.from_pretrained(tiny_path)
    hf.add_special_tokens({"additional_special_tokens": TOKENS, "eos_token": ENDS.get(family, "<|im_end|>")})
    hf.add_tokens(ORDINARY)
    hf.chat_template = FAMILIES[family]
    hf.save_pretrained(folder / family)
    return ChatTokenizer(str(folder / family), "chat")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: ToolCall, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning:
        message["reasoning"] = reasoning
    return message


def call(name: str, call_id: str = "call00000", **arguments: Any) -> ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, call_id: str = "call00000") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}
