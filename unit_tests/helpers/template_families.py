"""Chat templates of our own that behave as those of thirty families do, each with a tokenizer of the family's kind.

They have the shape of the originals, and not their words: what opens and ends a turn, what is written once, what is
left out of history, and which tokens are special. `reply` finds what a policy would say in a whole conversation.
"""

from __future__ import annotations

from tokenizers import AddedToken

from data_prep import smollm2
from unit_tests.helpers import chat_families
from unit_tests.helpers.template_texts import (
    COMMAND,
    COMMAND_R7B,
    COMMAND_SPECIAL,
    DEEPSEEK,
    DEEPSEEK_TOKENS,
    GEMMA,
    GLM4,
    GPT_OSS,
    IM,
    IM_REPLY,
    INST_REPLY,
    LLAMA2,
    MISTRAL3,
    OLMO,
    R1,
    V31,
    Family,
    between,
    chatml,
    tag,
    turns,
)

THOUGHTS = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")


FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        template=chat_families.QWEN25, kind="bytes", special=IM, eos="<|im_end|>", ordinary=CALLS, reply=IM_REPLY
    ),
    "qwen2.5 base": Family(
        template=chat_families.QWEN25,
        kind="bytes",
        special=IM,
        eos="<|endoftext|>",
        ordinary=CALLS,
        reply=IM_REPLY,
    ),
    "qwen3": Family(
        template=chat_families.QWEN3,
        kind="bytes",
        special=IM,
        eos="<|im_end|>",
        stops=["<|endoftext|>"],
        ordinary=CALLS + THOUGHTS,
        reply=IM_REPLY,
    ),
    "qwen3 without thinking": Family(
        template=chat_families.QWEN3.replace(
            chat_families.CHATML_NEXT,
            chat_families.CHATML_NEXT.replace(
                "{%- endif %}",
                "{%- if enable_thinking is defined and not enable_thinking %}"
                "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
            ),
        ),
        kind="bytes",
        special=IM,
        eos="<|im_end|>",
        ordinary=CALLS + THOUGHTS,
        args={"enable_thinking": False},
        # the header of the last reply holds an empty thought, and of the others none
        reply=r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)",
        header=("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ),
    "hermes": Family(
        template=chat_families.HERMES,
        kind="always",
        special=IM,
        bos="<s>",
        eos="<|im_end|>",
        ordinary=CALLS,
        reply=IM_REPLY,
    ),
    "smollm2": Family(
        template=smollm2.TOOL_TEMPLATE,
        kind="bytes",
        special=IM,
        eos="<|im_end|>",
        ordinary=CALLS,
        reply=IM_REPLY,
        clean_up=True,
    ),
    "llama2": Family(
        template=LLAMA2, kind="legacy", special=(), bos="<s>", eos="</s>", reply=INST_REPLY, adds_bos=True
    ),
    "llama3": Family(
        template=chat_families.LLAMA3,
        kind="bytes",
        special=("<|begin|>", "<|header|>", "<|header_end|>", "<|python_tag|>"),
        eos="<|eot|>",
        reply=between("<|header|>assistant<|header_end|>\n\n", "<|eot|>"),
        clean_up=True,
    ),
    "mistral 1": Family(
        template=turns(("[INST] ", " [/INST]"), ("", "</s>"), bos_token=True),
        kind="legacy",
        special=(),
        bos="<s>",
        eos="</s>",
        reply=INST_REPLY,
    ),
    "mistral 3": Family(
        template=MISTRAL3,
        kind="always",
        special=(
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        bos="<s>",
        eos="</s>",
        reply=r"(?:\[/INST\]|\[/TOOL_RESULTS\])(.*?</s>)",
    ),
    "mistral nemo": Family(
        template=turns(("[INST]", "[/INST]"), ("", "</s>"), bos_token=True),
        kind="bytes",
        special=("[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
        reply=INST_REPLY,
    ),
    "zephyr": Family(
        template=turns((tag("user"), "</s>\n"), (tag("assistant"), "</s>\n"), system=(tag("system"), "</s>\n")),
        kind="legacy",
        special=(),
        bos="<s>",
        eos="</s>",
        reply=between("<|assistant|>\n", "</s>"),
    ),
    "tinyllama": Family(
        template=turns((tag("user"), "</s>\n"), (tag("assistant"), "</s>\n"), system=(tag("system"), "</s>\n")),
        kind="first",
        special=(),
        bos="<s>",
        eos="</s>",
        reply=between("<|assistant|>\n", "</s>"),
    ),
    "phi-3": Family(
        template=turns(
            (tag("user"), "<|end|>\n"),
            (tag("assistant"), "<|end|>\n"),
            system=(tag("system"), "<|end|>\n"),
            last="<|endoftext|>",
        ),
        kind="legacy",
        special=[
            AddedToken(t, normalized=False, rstrip=True) for t in ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
        ],
        bos="<s>",
        eos="<|endoftext|>",
        reply=between("<|assistant|>\n", "<|end|>"),
    ),
    "phi-4": Family(
        template=turns(**{k: (a.replace("\n", "<|im_sep|>"), b[:-1]) for k, (a, b) in chatml().items()}),
        kind="bytes",
        special=(*IM, "<|im_sep|>"),
        eos="<|endoftext|>",
        stops=["<|im_end|>"],
        reply=between("<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
    ),
    "gemma 2": Family(
        template=GEMMA.replace("{%- set first.text = m.content + '\\n\\n' %}", "{{- raise_exception('no system') }}"),
        kind="never",
        special=("<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
        reply=between("<start_of_turn>model\n", "<end_of_turn>"),
    ),
    "gemma 3": Family(
        template=GEMMA,
        kind="never",
        special=("<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        stops=["<end_of_turn>"],
        adds_bos=True,
        reply=between("<start_of_turn>model\n", "<end_of_turn>"),
    ),
    "glm-4": Family(
        template=GLM4,
        kind="bytes",
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        eos="<|endoftext|>",
        stops=["<|user|>", "<|observation|>"],
        # a call stands in the line of the header, and the next turn's header ends a reply
        reply=r"<\|assistant\|>(.*?(?:<\|user\|>|<\|observation\|>|$))",
        appended="<|user|>",
    ),
    "deepseek": Family(
        template=turns(**DEEPSEEK, bos_token=True),
        kind="bytes",
        **DEEPSEEK_TOKENS,
        reply=between("<|Assistant|>", "<|end_of_sentence|>"),
    ),
    "r1-distill": Family(
        template=R1,
        kind="bytes",
        **DEEPSEEK_TOKENS,
        ordinary=THOUGHTS,
        reply=r"<\|Assistant\|>(?:<think>\n)?(.*?<\|end_of_sentence\|>)",
        header=("<|Assistant|>", "<|Assistant|><think>\n"),
    ),
    "deepseek 3.1": Family(
        template=V31,
        kind="bytes",
        **DEEPSEEK_TOKENS,
        ordinary=THOUGHTS,
        args={"thinking": True},
        reply=r"<\|Assistant\|>(?:<think>|</think>)?(.*?<\|end_of_sentence\|>)",
        header=("<|Assistant|></think>", "<|Assistant|><think>"),
    ),
    "vicuna": Family(
        template=turns(("USER: ", " "), ("ASSISTANT: ", "</s>"), header="ASSISTANT:", system=("", " "), bos_token=True),
        kind="legacy",
        special=(),
        bos="<s>",
        eos="</s>",
        reply=r"ASSISTANT:(.*?</s>)",
    ),
    "alpaca": Family(
        template=turns(
            ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), system=("", "\n"), bos_token=True
        ),
        kind="bytes",
        special=("<|EOT|>",),
        bos="<s>",
        eos="<|EOT|>",
        reply=between("### Response:\n", "<|EOT|>"),
    ),
    "granite": Family(
        template=turns(
            *((f"<|start_of_role|>{r}<|end_of_role|>", "<|end_of_text|>\n") for r in ("user", "assistant")),
            system=("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
        ),
        kind="bytes",
        special=("<|start_of_role|>", "<|end_of_role|>"),
        eos="<|end_of_text|>",
        reply=between("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>"),
    ),
    "command-r": Family(
        template=turns(**COMMAND, bos_token=True),
        kind="bytes",
        special=COMMAND_SPECIAL,
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        reply=between(COMMAND["reply"][0], "<|END_OF_TURN_TOKEN|>"),
    ),
    "command-r7b": Family(
        template=turns(**COMMAND_R7B, bos_token=True),
        kind="bytes",
        special=COMMAND_SPECIAL,
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        reply=between(COMMAND["reply"][0], "<|END_OF_TURN_TOKEN|>"),
    ),
    "gpt-oss": Family(
        template=GPT_OSS,
        kind="bytes",
        special=("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        eos="<|return|>",
        stops=["<|call|>"],
        # <|end|> is no end at which the engine stops: it is not learnt
        reply=r"<\|start\|>assistant(<\|channel\|>.*?(?:<\|return\|>|(?=<\|end\|><\|start\|>user)))",
        sampled_end=("<|end|><|start|>user", "<|return|><|start|>user"),
    ),
    "olmo 2": Family(
        template=OLMO,
        kind="bytes",
        special=(),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        reply=between("<|assistant|>\n", "<|endoftext|>"),
    ),
    "internlm 2": Family(
        template=turns(**chatml(), bos_token=True),
        kind="first",
        special=IM,
        bos="<s>",
        eos="</s>",
        stops=["<|im_end|>"],
        reply=IM_REPLY,
        adds_bos=True,
    ),
    "chatml in plain letters": Family(
        template=turns(**chatml()), kind="bytes", special=(), eos="<|endoftext|>", reply=IM_REPLY
    ),
    "falcon": Family(
        template=turns(("User: ", "\n\n"), ("Assistant: ", "\n\n"), header="Assistant:", system=("", "\n\n")),
        kind="bytes",
        special=(),
        eos="<|endoftext|>",
        reply=r"Assistant:( .*?)(?=\n\n|$)",
        appended="<|endoftext|>",
    ),
    "openchat": Family(
        template=turns(
            ("GPT4 Correct User: ", "<|end_of_turn|>"),
            ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
            header="GPT4 Correct Assistant:",
            bos_token=True,
        ),
        kind="legacy",
        special=("<|end_of_turn|>",),
        bos="<s>",
        eos="</s>",
        stops=["<|end_of_turn|>"],
        reply=between("GPT4 Correct Assistant:", "<|end_of_turn|>"),
    ),
    "kimi": Family(
        template=turns(
            *((f"<|im_{r}|>{r}<|im_middle|>", "<|im_end|>") for r in ("user", "assistant")),
            system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        ),
        kind="bytes",
        special=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        eos="[EOS]",
        stops=["<|im_end|>"],
        reply=between("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    ),
}
