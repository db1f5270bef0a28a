"""Keys of `data`."""

from __future__ import annotations

from datetime import datetime
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from core.strict_model import StrictModel

COLUMNS = (
    *("id", "messages", "completion", "tools", "answer", "demonstration", "episodes", "chosen", "rejected"),
    *("label", "completions", "rewards", "image", "images"),
)
OURS = "ours"
"""Form of rows with our columns."""
TrainOn = Literal["everything", "last_reply"] | list[str]


class SourceConfig(StrictModel):
    """Data set of a mixture, or the only data set."""

    path: str
    """Parquet, JSONL, JSON, CSV or Arrow file (also .jsonl.gz, .json.gz, .csv.gz), folder written by
    datasets.save_to_disk, or hub:NAME (hub:NAME/CONFIG). A file or folder may be in a store: s3://, gs://, hf://,
    https:// and other protocols of fsspec; it is downloaded once."""
    # No slash, because the name is one part of a metric's name: data/<name>/rows.
    name: str = Field("", pattern="^[^/]*$")
    """Name of the source in the log, without "/" and unique in a mixture. Unset: name of the file or data set."""
    ratio: float = Field(1.0, gt=0)
    """Rows drawn from this source, relative to the other sources. Exact: after any number of rows, each source's count
    differs from its share by less than a row."""
    split: str = "train"
    """Split of a Hugging Face data set, or key of a JSON file."""
    form: str = "auto"
    """Form of the rows, such as alpaca, sharegpt or verl; docs/how_to/data_set.md lists them. auto: the only form that
    fits the columns and the first 200 rows; the run says which it is, and its config.yaml names it."""
    columns: dict[str, str] = Field({})
    """Mapping from our column names to those of the data set, if they differ. Ours: id, messages, completion, tools,
    answer, demonstration, episodes, chosen, rejected, label, completions, rewards, image, images. Theirs may be a
    dotted path, such as reward_model.ground_truth. With `form: auto`, no form is recognised, and `messages` as plain
    text is a user turn, after the row's images; `completion` is the reply to it."""
    lazy: Literal["auto"] | bool = "auto"
    """true: find rows by an index and convert them when they are drawn, so that a run of any size starts at once.
    false: read, check and convert all rows before the start. auto: true for Parquet, JSONL, Arrow and save_to_disk
    above 2 GiB."""
    replacement: bool = False
    """true: draw each row at random from all rows. false: draw every row once per epoch."""

    @field_validator("columns")
    @classmethod
    def maps_ours(cls, given: dict[str, str]) -> dict[str, str]:
        if unknown := [key for key in given if key not in COLUMNS]:
            raise ValueError(f"{unknown[0]} is not one of our columns: {', '.join(COLUMNS)}")
        return given

    @property
    def log_name(self) -> str:
        """Name of the source in the log."""
        if self.name:
            return self.name
        if self.path.startswith("hub:"):
            return self.path.removeprefix("hub:").split("/")[:2][-1]
        # an address may have parameters
        name = PurePath(self.path.split("?")[0] if "://" in self.path else self.path)
        # train.jsonl.gz has two suffixes.
        return PurePath(name.stem).stem if name.suffix == ".gz" else name.stem


class HoldOutConfig(StrictModel):
    """Held-out rows that are taken from data.train."""

    from_train: int = Field(ge=1)
    """Number of rows of data.train to hold out, of each source of a mixture. They are chosen by the hash of what they
    hold: equal rows are all kept out of training, and a resumed run holds the same rows out."""


def _name_choice(given: Any) -> str:
    """Return the choice of `data.eval` that a value is meant for, so that an error is about that one."""
    is_source = isinstance(given, dict) and not given.keys().isdisjoint(SourceConfig.model_fields)
    if isinstance(given, HoldOutConfig) or (isinstance(given, dict) and not is_source):
        return "HoldOutConfig"
    return "SourceConfig" if isinstance(given, dict | SourceConfig) else "str"


EvalRows = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[SourceConfig, Tag("SourceConfig")]
    | Annotated[HoldOutConfig, Tag("HoldOutConfig")],
    Discriminator(_name_choice),
]


class TemplateConfig(StrictModel):
    """Keys of `data` for the conversion of conversations to tokens."""

    template: Literal["chat", "plain"] = "chat"
    """Conversion of messages to text. chat: the tokenizer's chat template. plain: concatenated contents."""
    template_args: dict[str, Any] = Field({})
    """Arguments of the chat template, such as {enable_thinking: false}, for all rows: prompts, held-out and supervised
    rows. Arguments that the template does not read are refused."""
    template_date: str | None = None
    """Date, or date and time, that the chat template writes, such as '2026-11-25'. Unset: the start of the run; a
    resumed run takes that of its checkpoint. Refused if the template writes no date."""
    chat_template: str | None = Field(None, min_length=1)
    """Chat template in place of the model's: the path of a Jinja file, or the text of one. Saved with the model."""
    end_of_turn: str | None = Field(None, min_length=1)
    """Token that ends an assistant turn: replies stop at it and are trained up to it. Unset: the token that the chat
    template writes after a reply, as --explain shows."""
    system_prompt: str | None = Field(None, min_length=1)
    """System message for every row without a system message. Refused if the template would drop it."""

    max_image_pixels: int = Field(2**24, ge=1)
    """Maximum pixels of an image: width times height. Rows with a larger image are invalid, as are rows with an image
    side above 8192 pixels."""

    @field_validator("template_date", mode="before")
    @classmethod
    def is_a_date(cls, given: Any) -> Any:
        try:
            return given if given is None else datetime.fromisoformat(given).isoformat()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{given!r:.60} is no date: write one such as '2026-11-25'") from error

    @model_validator(mode="after")
    def plain_text_has_no_template(self) -> TemplateConfig:
        for key in ("template_args", "chat_template", "template_date"):
            if self.template == "plain" and getattr(self, key):
                raise ValueError(f"template is plain, and {key} is for a chat template: leave one of them out")
        return self


class CurriculumPhase(StrictModel):
    """Ratios of the sources for a number of rows."""

    rows: int = Field(ge=1)
    """Number of rows (in RL: prompts, with those that the algorithm rejects) to draw in this phase."""
    ratios: dict[str, Annotated[float, Field(ge=0)]]
    """Rows drawn from each source of `train`, by name, relative to the others; 0: none."""


class DataConfig(TemplateConfig):
    """Keys of `data` shared by RL and supervised runs."""

    train: str | list[SourceConfig]
    """Training rows: a source's `path` (data_prep/ creates such files), or a mixture as a list of sources with path and
    ratio. Columns: id, messages, answer, and tools available to the policy. Pairs also have chosen and rejected,
    unpaired rows label, scored rows completions and rewards."""
    eval: EvalRows | None = None
    """Held-out rows: a source of their own, or {from_train: 200} for rows of `train`. Reward (or loss) on them is
    measured before and after training."""
    eval_rows: int = Field(200, ge=1)
    """Maximum number of rows of `eval` to use, if it is a source."""
    curriculum: list[CurriculumPhase] | None = None
    """Phases with other ratios of the sources, before those of `train` apply: [{rows: 1000, ratios: {easy: 1, hard:
    0}}]. Exact, as the ratios of a mixture."""
    max_invalid_fraction: float = Field(0.1, ge=0, le=1)
    """Maximum fraction of invalid rows (missing or empty column, too long, no reply). Invalid rows are counted and
    shown. A larger fraction stops the run at the start."""

    def list_sources(self, which: Literal["train", "eval"]) -> list[SourceConfig]:
        """Return the sources of `train` or `eval`; empty if unset. Those of `eval` may be those of `train`."""
        given = self.train if which == "train" or self.held_out_rows else self.eval
        listed = given if isinstance(given, list) else [] if given is None else [given]
        return [SourceConfig(path=source) if isinstance(source, str) else source for source in listed]

    @property
    def held_out_rows(self) -> int:
        """Rows of each source of `train` that are held out; 0 if `eval` is another source, or unset."""
        return self.eval.from_train if isinstance(self.eval, HoldOutConfig) else 0

    def with_forms(self, which: Literal["train", "eval"], forms: list[str], lazy: list[bool]) -> Self:
        """Return the keys with the form of each source of `train` or `eval`, and whether it is lazy, in place of auto.

        A path alone, whose rows have our columns and are read before the start, stays a path.
        """
        given = self.train if which == "train" else self.eval
        if isinstance(given, HoldOutConfig) or (isinstance(given, str) and forms == [OURS] and lazy == [False]):
            return self
        sources = [
            source.model_copy(update={"form": form, "lazy": is_lazy})
            for source, form, is_lazy in zip(self.list_sources(which), forms, lazy, strict=True)
        ]
        return self.model_copy(update={which: sources if which == "train" else sources[0]})

    @model_validator(mode="after")
    def a_mixture_has_names(self) -> DataConfig:
        if not self.train:
            raise ValueError("train names no source: give a path, or a list of sources")
        # Metrics and rewards are logged by these names: two sources of one name would overwrite each other.
        names = [source.log_name for source in self.list_sources("train")]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources of train are called {twice[0]}: give them names of their own (name: ...)")
        return self

    @model_validator(mode="after")
    def a_curriculum_has_a_mixture(self) -> DataConfig:
        names = {source.log_name for source in self.list_sources("train")}
        for phase in self.curriculum or ():
            if phase.ratios.keys() != names:
                said = f"names {', '.join(phase.ratios)}, and the sources of train are {', '.join(sorted(names))}"
                raise ValueError(f"a phase of curriculum {said}: give each a ratio, or 0")
            if not any(phase.ratios.values()):
                raise ValueError("a phase of curriculum draws from no source: give one a ratio above 0")
        return self


class PromptDataConfig(DataConfig):
    """Prompts of reinforcement learning."""

    max_prompt_tokens: int = Field(1024, ge=1)
    """Maximum tokens of a prompt. Rows with a longer prompt are invalid."""
    sampler: str | dict[str, Any] | None = None
    """Rule that chooses the next rows from earlier results: name of a module in data_feeds/samplers/ (thompson, pools,
    no_positive, priority, uniform), path of a Python file, or settings with a `name` or a `file`: {name: thompson,
    forget: 0.8}. Unset: every row once per pass."""
    continue_final_message: bool = False
    """true: a row may end with an assistant turn, which the policy continues; its text is part of the prompt. false:
    such a row is invalid."""

    @model_validator(mode="after")
    def a_sampler_draws_without_replacement(self) -> PromptDataConfig:
        if self.sampler is not None and (anew := [s.path for s in self.list_sources("train") if s.replacement]):
            raise ValueError(f"sampler chooses the rows, and {anew[0]} has replacement: leave one of them out")
        return self


class RowDataConfig(DataConfig):
    """Rows of supervised learning."""

    train_on: TrainOn = Field(["assistant"])
    """Roles whose turns are trained on, end-of-turn tokens included. last_reply: only the last assistant turn
    (completion-only). everything: all tokens. A message's own `train` (or `weight`) of true, false, 1 or 0 decides for
    its turn. Preference algorithms always use the last reply."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum tokens of a row. Longer rows are invalid."""

    @model_validator(mode="after")
    def trains_on_something(self) -> RowDataConfig:
        # Without a role no token has a weight, and every update would be empty.
        if not self.train_on:
            raise ValueError("train_on names no role: give some, such as [assistant]")
        return self
