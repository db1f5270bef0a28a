"""Talk with a trained model: python -m tools.chat MODEL

MODEL is a run, model, adapter or checkpoint folder, or a name on the hub. See tools/speaker.py. One line is one turn;
/new begins a new conversation, and /quit or Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from core.errors import UserError
from core.types.messages import Message
from tools.speaker import Speaker, add_arguments, open_speaker, run_tool


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.chat", description=__doc__.split("\n")[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    talk(open_speaker(args), seed=args.seed)


def talk(speaker: Speaker, *, seed: int) -> None:
    """Answer every line of the standard input until it ends."""
    shows_prompt = sys.stdin.isatty()
    messages: list[Message] = []
    while True:
        if shows_prompt:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text == "/quit":
            return
        if text == "/new":
            messages = []
        elif text:
            messages = _answer(speaker, [*messages, {"role": "user", "content": text}], seed + len(messages))


def _answer(speaker: Speaker, messages: list[Message], seed: int) -> list[Message]:
    """Print the reply and return the conversation with it; one that is too long begins anew."""
    try:
        [reply] = asyncio.run(speaker.reply(messages, [seed]))
    except UserError as error:
        print(f"{error}; a new conversation begins", file=sys.stderr, flush=True)
        return []
    print(reply, flush=True)
    return [*messages, {"role": "assistant", "content": reply}]


if __name__ == "__main__":
    run_tool(main)
