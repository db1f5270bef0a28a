"""Family of chat templates and its tokenizer, and templates that behave as families' do. See template_families.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from configs.data_schema import TemplateConfig
from configs.trainer_schema import ModelConfig
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from unit_tests.helpers.made_tokenizers import Kind, make_hf


@dataclass(frozen=True, kw_only=True)
class Family:
    """Chat template and tokenizer that behave as a family's do."""

    template: str
    kind: Kind
    special: Sequence[str | AddedToken]
    eos: str
    bos: str | None = None
    ordinary: Sequence[str] = ()
    stops: Sequence[str] = ()
    """Further tokens at which the generation config stops."""
    reply: str
    """Regular expression of a reply in a whole text; group 1 is what the policy says, up to the token that ends it."""
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    adds_bos: bool = False
    clean_up: bool = False
    appended: str = ""
    """Token that ends the last reply, and that the template writes only with the next turn, or never."""
    header: tuple[str, str] = ("", "")
    """Header of earlier replies in the template, and of all replies in sampling, if they differ."""
    sampled_end: tuple[str, str] = ("", "")
    """End of earlier replies in the template, and as the policy says it, if they differ."""

    def make_hf(self) -> Any:
        return make_hf(
            self.kind,
            [*dict.fromkeys([*self.special, self.eos, *([self.bos] if self.bos else []), *self.stops])],
            eos=self.eos,
            bos=self.bos,
            ordinary=self.ordinary,
            adds_bos=self.adds_bos,
            chat_template=self.template,
            clean_up_tokenization_spaces=self.clean_up,
        )

    def load(self, folder: Path, **settings: Any) -> ChatTokenizer:
        """Save the tokenizer and return what a run would load. settings: keys of `data`."""
        hf = self.make_hf()
        hf.save_pretrained(folder)
        if self.stops:
            ids = hf.convert_tokens_to_ids([self.eos, *self.stops])
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        data = TemplateConfig(**({"template_args": self.args} | settings))
        return make_tokenizer(ModelConfig(path=str(folder)), data)

    def find_replies(self, text: str) -> list[tuple[int, int]]:
        """Return the range of every reply in a whole text, with the token that ends it."""
        return [m.span(1) for m in re.finditer(self.reply, text, re.DOTALL)]


def between(before: str, after: str) -> str:
    """Return the expression of replies between two texts."""
    return f"{re.escape(before)}(.*?{re.escape(after)})"


def turns(
    user: tuple[str, str],
    reply: tuple[str, str],
    *,
    system: tuple[str, str] | None = None,
    tool: tuple[str, str] | None = None,
    start: str = "",
    header: str | None = None,
    last: str = "",
    trim: bool = False,
    bos_token: bool = False,
) -> str:
    """Return a template that writes every turn between two texts. header: what opens a reply, if not reply[0].

    Without `system`, a system turn begins the first question, and without `tool`, results are refused. last: text after
    the last turn, unless a reply follows.
    """
    q = json.dumps
    text = "(m.content | trim)" if trim else "m.content"
    both = (
        {"assistant": reply, "user": user} | ({"system": system} if system else {}) | ({"tool": tool} if tool else {})
    )
    cases = "".join(
        f"{{%- {'if' if i == 0 else 'elif'} m.role == {q(role)} %}}{{{{- {q(a)} + first.text + {text} + {q(b)} }}}}"
        if role == "user"
        else f"{{%- {'if' if i == 0 else 'elif'} m.role == {q(role)} %}}{{{{- {q(a)} + {text} + {q(b)} }}}}"
        for i, (role, (a, b)) in enumerate(both.items())
    )
    begins = "{{- bos_token }}" if bos_token else ""
    return (
        begins + ("{{- " + q(start) + " }}" if start else "") + '{%- set first = namespace(text="") %}'
        "{%- for m in messages %}"
        + ("" if system else "{%- if m.role == 'system' %}{%- set first.text = m.content + '\\n\\n' %}{%- else %}")
        + cases
        + "{%- else %}{{- raise_exception('no turn of ' + m.role + ', please') }}{%- endif %}"
        + "{%- if m.role == 'user' %}{%- set first.text = '' %}{%- endif %}"
        + ("" if system else "{%- endif %}")
        + "{%- endfor %}"
        + f"{{%- if add_generation_prompt %}}{{{{- {q(reply[0] if header is None else header)} }}}}"
        + (f"{{%- else %}}{{{{- {q(last)} }}}}" if last else "")
        + "{%- endif %}"
    )


def chatml(end: str = "<|im_end|>", nl: str = "\n") -> dict[str, Any]:
    return {
        "user": (f"<|im_start|>user{nl}", f"{end}{nl}"),
        "reply": (f"<|im_start|>assistant{nl}", f"{end}{nl}"),
        "system": (f"<|im_start|>system{nl}", f"{end}{nl}"),
    }


IM = ("<|im_start|>", "<|im_end|>")
IM_REPLY = between("<|im_start|>assistant\n", "<|im_end|>")
GEMMA = turns(
    ("<start_of_turn>user\n", "<end_of_turn>\n"),
    ("<start_of_turn>model\n", "<end_of_turn>\n"),
    bos_token=True,
    trim=True,
)
# the bos token before every question, and spaces around a reply
LLAMA2 = turns(("<s>[INST] ", " [/INST]"), (" ", " </s>"), header="", trim=True)
# the tools before the last question, wherever that is
MISTRAL3 = (
    "{{- bos_token }}{%- set ns = namespace(last=-1, system='') %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{{- '[INST] ' + ns.system + m.content + '[/INST]' }}{%- set ns.system = '' %}"
    "{%- elif m.role == 'system' %}{%- set ns.system = m.content + '\\n\\n' %}"
    "{%- elif m.role == 'tool' %}"
    '{{- \'[TOOL_RESULTS] {"content": \' + (m.content | tojson) + \', "call_id": "\' + m.tool_call_id + \'"}'
    "[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{{- ({'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson) }}"
    "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']' + eos_token }}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
R1_TURNS = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}"
    "{%- elif m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{%- set c = m.content %}"
    "{%- if '</think>' in c %}{%- set c = c.split('</think>')[-1] %}{%- endif %}"
    "{{- 'OPENS' + c + '<|end_of_sentence|>' }}"
    "{%- else %}{{- raise_exception('no turn of tool, please') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'HEADER' }}{%- endif %}"
)
R1 = R1_TURNS.replace("OPENS", "<|Assistant|>").replace("HEADER", "<|Assistant|><think>\\n")
V31 = R1_TURNS.replace("OPENS", "<|Assistant|></think>").replace(
    "{{- 'HEADER' }}", "{{- '<|Assistant|>' + ('<think>' if thinking else '</think>') }}"
)
GLM4 = (
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' }}{%- for t in tools %}{{- (t | tojson) + '\\n' }}"
    "{%- endfor %}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}"
    "{%- elif m.tool_calls %}{{- '<|assistant|>' + m.tool_calls[0].function.name + '\\n' "
    "+ (m.tool_calls[0].function.arguments | tojson) }}"
    "{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# analysis in a channel of its own, left out of history; another token ends the last reply
GPT_OSS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if loop.last and m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last else '<|end|>' }}"
    "{%- elif m.role == 'tool' %}{{- raise_exception('no turn of tool, please') }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
OLMO = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|assistant|>\\n' + m.content + eos_token + ('' if loop.last else '\\n') }}"
    "{%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
COMMAND = {
    role: (f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
    for role, name in (("user", "USER"), ("reply", "CHATBOT"), ("system", "SYSTEM"))
}
COMMAND_SPECIAL = (
    "<|START_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
)
COMMAND_R7B = COMMAND | {
    "reply": (COMMAND["reply"][0] + "<|START_RESPONSE|>", "<|END_RESPONSE|>" + COMMAND["reply"][1]),
    "header": COMMAND["reply"][0],
}
DEEPSEEK = {"user": ("<|User|>", ""), "reply": ("<|Assistant|>", "<|end_of_sentence|>"), "system": ("", "\n\n")}
DEEPSEEK_TOKENS: dict[str, Any] = {
    "special": ("<|User|>", "<|Assistant|>"),
    "bos": "<|begin_of_sentence|>",
    "eos": "<|end_of_sentence|>",
}
INST_REPLY = r"\[/INST\](.*?</s>)"


def tag(role: str) -> str:
    return f"<|{role}|>\n"
