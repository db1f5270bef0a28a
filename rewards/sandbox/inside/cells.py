"""Python interpreter for pieces of code: python3 cells.py, one line {"source": ...} in, one line {"output": ...} out.

Names persist between pieces. The output is printed text, the value of the last expression, and the last lines of a
traceback, as in a notebook.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import traceback
from typing import Any

# In bytes. The output becomes part of the policy's context.
LONGEST_OUTPUT = 20_000


def main() -> None:
    # the pipes get new descriptors, and 0, 1 and 2 go elsewhere: printed text must not mix with the responses
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # a file, not a pipe: it takes any amount of output without a reader
    shown, name = tempfile.mkstemp()
    os.unlink(name)
    os.dup2(shown, 1)
    os.dup2(shown, 2)
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in asked:
        run_cell(json.loads(line)["source"], names)
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(json.dumps({"output": take_output(shown)}).encode() + b"\n")
        answers.flush()


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run statements, and print the value of a last expression."""
    try:
        tree = ast.parse(source, "cell")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # sys.exit ends the piece, not the session
        sys.stdout.flush()
        # without the frame of this function
        own = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, own, limit=-3)


def take_output(handle: int) -> str:
    """Return the printed text, shortened in the middle, and clear it."""
    size = os.fstat(handle).st_size
    if size <= LONGEST_OUTPUT:
        text = os.pread(handle, size, 0).decode(errors="replace")
    else:
        half = LONGEST_OUTPUT // 2
        first, last = os.pread(handle, half, 0), os.pread(handle, half, size - half)
        left_out = f"\n... {size - LONGEST_OUTPUT} bytes are left out ...\n"
        text = first.decode(errors="replace") + left_out + last.decode(errors="replace")
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    return text


if __name__ == "__main__":
    main()
