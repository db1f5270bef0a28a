"""Process of the zoo that checks one model: python -m tools.zoo.child NAME FOLDER STAGE ...

It appends a JSON line per stage to results.jsonl in the folder.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from core.errors import UserError, first_line
from tools.zoo.stages import STAGES, NoExperts
from tools.zoo.subject import Subject

RESULTS = "results.jsonl"


def main(name: str, folder: str, *stages: str) -> None:
    """Make the model, and run the stages. A model that cannot be made fails in all of them."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    subject = Subject(name=name, folder=Path(folder))
    for stage in stages:
        result = run_stage(subject, stage)
        with (subject.folder / RESULTS).open("a") as file:
            file.write(json.dumps(result) + "\n")


def run_stage(subject: Subject, stage: str) -> dict[str, Any]:
    """Return the line of a stage: its state, its numbers or the reason, and its seconds."""
    began = time.perf_counter()
    found: dict[str, Any] = {"model": subject.name, "stage": stage}
    try:
        if not Path(subject.path).is_dir():
            subject.make()
        numbers = STAGES[stage](subject)
        found |= {"state": "ok"} | {key: v if isinstance(v, str) else float(f"{v:.3g}") for key, v in numbers.items()}
    except UserError as refusal:
        found |= {"state": "refused", "why": hide_folder(str(refusal), subject)}
    except NoExperts as none:
        found |= {"state": "none", "why": str(none)}
    except Exception as error:  # a border: whatever a library raises is this row's reason
        traceback.print_exc()
        # the first line of pydantic's errors says only how many there are
        line = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
        found |= {"state": "failed", "why": hide_folder(f"{type(error).__name__}: {line}", subject)}
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def hide_folder(text: str, subject: Subject) -> str:
    """Return the text without the path of a temporary folder."""
    return text.replace(f"{subject.folder}/", "")


if __name__ == "__main__":
    main(*sys.argv[1:])
