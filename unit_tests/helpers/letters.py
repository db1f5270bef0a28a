"""The tiny models' chat format, written by hand, to compare recorded samples with their messages token by token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from data_prep.tiny_model import UNKNOWN

CALL = re.compile(r"@([a-z_]+)(\{.*?\});", re.DOTALL)


class Letters:
    """A token per role, end and character; tools and calls as data_prep.tiny_model --tools writes them."""

    def __init__(self, model: Path):
        words = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        self.ids: dict[str, int] = words["model"]["vocab"]
        self.texts = {i: text for text, i in self.ids.items()}

    def write(self, message: dict[str, Any]) -> list[int]:
        """Tokens of a message that the policy did not sample."""
        return [self.ids[f"<|{message['role']}|>"], *(self.ids.get(c, self.ids[UNKNOWN]) for c in message["content"])]

    def check(self, row: dict[str, Any], *, tools: str = "") -> int:
        """Compare a recorded sample with its messages, token by token. Return the number of replies.

        tools: as name(argument,argument), one after the other, which the prompt begins with.
        """
        ids, logp = row["token_ids"], row["logp"]
        turns = row.get("turns") or [{"role": "assistant", "content": row["completion"], "tokens": row["new_tokens"]}]
        at, replies = 0, 0
        before = [*([{"role": "system", "content": tools}] if tools else []), *row["prompt"]]
        for turn in turns:
            if turn["role"] != "assistant":
                before.append(turn)
                continue
            context = [i for message in before for i in self.write(message)] + [self.ids["<|assistant|>"]]
            end = at + len(context)
            assert ids[at:end] == context and set(logp[at:end]) == {None}, (row["id"], at)
            sampled = ids[end : end + turn["tokens"]]
            assert all(one is not None and one <= 0 for one in logp[end : end + turn["tokens"]])
            said = "".join(self.texts[i] for i in sampled if not self.texts[i].startswith("<|"))
            assert len(sampled) == turn["tokens"]
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in turn.get("tool_calls", [])]
            if calls:
                assert [(name, json.loads(given)) for name, given in CALL.findall(said)] == calls, (said, turn)
                said = CALL.sub("", said)
            assert said == turn["content"], (said, turn)
            at, replies, before = end + turn["tokens"], replies + 1, []
        assert at == len(ids), "a token that no message has"
        return replies
