"""Keys of `data`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from pydantic import Field, field_validator, model_validator

from core.section import Section

COLUMNS = ("id", "messages", "answer", "chosen", "rejected", "label")


class SourceConfig(Section):
    path: str
    """A Parquet or JSONL file, a folder written by datasets.save_to_disk, or hub:NAME (hub:NAME/CONFIG)."""
    name: str = Field("", pattern="^[^/]*$")
    """In the log; unset, the file's or data set's own name. Names are unique within a mixture, and have no /."""
    ratio: float = Field(1.0, gt=0)
    """Rows drawn from it, relative to the other sources. Exact: counts of any prefix are within one row of it."""
    split: str = "train"
    """Of a Hugging Face data set."""
    columns: dict[str, str] = Field({})
    """Our column -> theirs, where the names differ: id, messages, answer, chosen, rejected, label. A column of plain
    text under `messages` is one user turn."""
    replacement: bool = False
    """Draw each row anew from all; else every row comes once per pass."""

    @field_validator("columns")
    @classmethod
    def maps_ours(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := [key for key in given if key not in COLUMNS]:
            raise ValueError(f"{unknown[0]} is not one of our columns: {', '.join(COLUMNS)}")
        return given

    @property
    def called(self) -> str:
        """Its name in the log."""
        if self.name:
            return self.name
        if self.path.startswith("hub:"):
            return self.path.removeprefix("hub:").split("/")[:2][-1]
        return PurePath(self.path).stem


class DataConfig(Section):
    train: str | list[SourceConfig]
    """Where the rows are, as `path` of a source (data_prep/ makes such files); or a mixture: a list of sources, each
    with a path and a ratio. Rows have id, messages and answer; pairs also chosen and rejected, labelled ones label."""
    eval: str | SourceConfig | None = None
    """The same columns, held out: accuracy (or loss) on it is measured before and after."""
    eval_rows: int = Field(200, ge=1)
    """At most so many rows of `eval` are used."""
    learn: Literal["everything", "last_reply"] | list[str] = Field(["assistant"])
    """Supervised: the roles whose turns are learnt, their end-of-turn tokens included; last_reply: the last assistant
    turn only (completion-only); everything: every token. Preferences always compare the last reply."""
    max_unfit_share: float = Field(0.1, ge=0, le=1)
    """Rows that do not fit (a missing or empty column, too long, no reply) are counted and shown; a larger share of
    them stops the run before it starts."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's chat template. plain: the contents as they stand, one after another."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts (in supervised learning: longer rows) are rows that do not fit."""

    def sources(self, which: Literal["train", "eval"]) -> list[SourceConfig]:
        """What `train` or `eval` names, a plain path as a source; none where it is unset."""
        given = self.train if which == "train" else self.eval
        listed = given if isinstance(given, list) else [] if given is None else [given]
        return [SourceConfig(path=source) if isinstance(source, str) else source for source in listed]

    @model_validator(mode="after")
    def a_mixture_has_names(self) -> DataConfig:
        if not self.learn:
            raise ValueError("learn names no role: give some, such as [assistant]")
        if not self.train:
            raise ValueError("train names no source: give a path, or a list of sources")
        names = [source.called for source in self.sources("train")]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources of train are called {twice[0]}: give them names of their own (name: ...)")
        return self
