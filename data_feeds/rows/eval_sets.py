"""Load the data sets of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.eval_schema import EvalConfig
from core.errors import UserError
from core.types.messages import ToolSpec
from core.types.samples import Prompt
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.rows.invalid_rows import InvalidRows
from data_feeds.rows.read_source import read_source
from data_feeds.rows.remote_files import fetch_source
from data_feeds.rows.row_types import ROW_TYPES, RowConverter

OF_SET = "set"
"""Column of the table with the name of the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of one data set, in file order."""

    name: str
    prompts: list[Prompt]
    samples: int
    """Samples per prompt."""
    invalid: InvalidRows
    form: str
    """Form of the rows: see data_feeds/rows/forms.py."""
    notes: list[str]
    """Sentences about the form."""


def load_sets(cfg: EvalConfig, tokenizer: ChatTokenizer, env_tools: Sequence[ToolSpec] = ()) -> list[PromptSet]:
    """Load all data sets. Raises UserError for too few valid rows, or an invalid column of `data.by`.

    env_tools: tools of the environment. Their tokens count towards the length of every prompt.
    """
    sets: list[PromptSet] = []
    for i, one in enumerate(cfg.data.sets):
        converter = RowConverter(
            row_type=ROW_TYPES["prompts"],
            tokenizer=tokenizer,
            source=fetch_source(one.source, key := f"data.sets[{i}]={one.path}"),
            key=key,
            max_tokens=cfg.data.max_prompt_tokens,
            max_image_pixels=cfg.data.max_image_pixels,
            system_prompt=cfg.data.system_prompt,
            continue_final_message=cfg.data.continue_final_message,
            env_tools=env_tools,
        )
        read = read_source(converter, max_invalid_fraction=cfg.data.max_invalid_fraction, limit=one.rows)
        sets.append(
            PromptSet(
                name=one.source.log_name,
                prompts=read.items,
                samples=cfg.count_samples(one),
                invalid=read.invalid,
                form=read.form,
                notes=read.notes,
            )
        )
    _check_columns(cfg.data.by, sets)
    return sets


def _check_columns(by: list[str], sets: list[PromptSet]) -> None:
    if OF_SET in by:
        raise UserError(
            f"data.by names the column {OF_SET}, under which the table has the data sets: rename the column in the "
            "files, or leave it out, because each of several sets has a row"
        )
    there = sorted({column for one in sets for prompt in one.prompts for column in prompt.extra})
    if missing := [column for column in by if column not in there]:
        raise UserError(
            f"data.by names the column {missing[0]}, and no row has one; the other columns are "
            f"{', '.join(there) or 'none'}"
        )
