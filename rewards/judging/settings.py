"""Settings of a judge: `reward.settings` of the rewards judge and rubric."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from core.errors import UserError, quote
from core.strict_model import Seconds, StrictModel
from core.text.addresses import is_http_address
from core.text.secrets import has_secret

VerdictFormat = Literal["number", "letter", "json", "probability"]
ADVICE = "set api_key_env to the name of an environment variable that holds the key"
T = TypeVar("T", bound="JudgeSettings")


class JudgeSettings(StrictModel):
    """Settings of a judge."""

    base_url: str | None = None
    """Address of an OpenAI-compatible server, with the /v1. Unset: the judge of the run (`judge` of the recipe)."""
    model: str | None = None
    """Name of the model, sent as it is. Only with `base_url`."""
    api_key_env: str | None = None
    """Name of the environment variable with the key. Unset: no key is sent."""
    prompt_file: str | None = None
    """File with the prompt, with the places {reply} and {verdict}, and any of {question}, {answer}, {criteria}. Unset:
    that of the reward."""
    verdict: VerdictFormat = "number"
    """Form of the verdict. number: in `scale`. letter: one of `labels`. json: an object with a number in `scale`.
    probability: of the first of `words` against the second, by log-probabilities."""
    scale: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest number of a verdict."""
    labels: dict[str, float] = Field({"A": 1.0, "B": 0.0})
    """Value of each label, for `verdict: letter`."""
    words: tuple[str, str] = ("yes", "no")
    """Words of 1 and of 0, for `verdict: probability`. Of the judge of the run they are judge.allowed_tokens."""
    view: Literal["last", "whole"] = "last"
    """Messages that are shown: the last reply, or all messages after the prompt."""
    show_reasoning: bool = False
    """Show the policy's reasoning (<think>) too."""
    temperature: float | None = Field(0.0, ge=0, le=2)
    """Sampling temperature of the judge. null: not sent."""
    max_tokens: int | None = Field(1024, ge=1)
    """Maximum tokens of a verdict, reasons included. null: not sent."""
    extra: dict[str, Any] = Field({})
    """More keys of the request, such as response_format or chat_template_kwargs."""
    votes: int = Field(1, ge=1, le=99)
    """Verdicts per reply. The value is their mean, or the most frequent label."""
    seed: int = Field(0, ge=0)
    """Seed of the votes."""
    parse_retries: int = Field(2, ge=0)
    """Further verdicts to ask for if one cannot be read, at a temperature of at least 0.7."""
    max_concurrency: int = Field(32, ge=1)
    """Maximum number of requests in flight, of the whole run. Each engine gets an equal part, at least 1."""
    timeout_s: Seconds = 60.0
    """Deadline of one request in seconds."""
    outage_s: Seconds = 120.0
    """Seconds for which requests that a server cannot take are repeated, before the sample fails."""
    anchors: str | None = None
    """File with replies of known value, as JSON lines {prompt, reply, score}, that the judge grades again during the
    run: judge/anchor_error. Only for the reward judge."""
    anchors_every: int = Field(512, ge=1)
    """Verdicts of a reward process from which the anchors are graded once."""
    cache: bool = True
    """Keep verdicts in the run folder. An equal request, also of a resumed run, then costs no call."""

    @model_validator(mode="after")
    def keys_fit_each_other(self) -> JudgeSettings:
        if self.base_url is None:
            given = self.model_fields_set & {"model", "api_key_env", "temperature", "extra", "words"}
            if given:
                raise ValueError(
                    f"{min(given)} is of a server: set base_url too, or leave it out for the judge of the run (`judge` "
                    "of the recipe)"
                )
        elif self.model is None:
            raise ValueError("model is missing: set the name under which the server of base_url knows it")
        elif not is_http_address(self.base_url):
            raise ValueError(f"base_url must be an address like http://host:8000/v1, found {quote(self.base_url)}")
        if "anchors_every" in self.model_fields_set and self.anchors is None:
            raise ValueError("anchors_every is set, and anchors is not: set it, or leave anchors_every out")
        if not self.scale[0] < self.scale[1]:
            raise ValueError("scale must be [lowest, highest]")
        if len(self.labels) < 2 or len({label.lower() for label in self.labels}) < len(self.labels):
            raise ValueError("labels must have two or more entries that differ in more than case")
        if self.votes > 1 and self.verdict == "probability":
            raise ValueError("votes would all be equal with verdict: probability: set votes to 1")
        if self.votes > 1 and self.temperature == 0 and self.base_url is not None:
            raise ValueError("votes would all be equal with temperature 0: raise temperature, or set votes to 1")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value of a verdict."""
        match self.verdict:
            case "letter":
                return min(self.labels.values()), max(self.labels.values())
            case "probability":
                return 0.0, 1.0
            case _:
                return self.scale

    def read_key(self) -> str | None:
        """Return the key from the environment. Raises UserError if it is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env, "").strip()):
            raise UserError(
                f"reward.settings.api_key_env: the environment variable {quote(self.api_key_env)} is not set on this "
                "machine: export it before the run, or leave the setting out for a server without keys"
            )
        return key


def read_settings(kind: type[T], given: Mapping[str, Any]) -> T:
    """Validate settings. Raises UserError, which never quotes a key."""
    if "api_key" in given:
        raise UserError(f"reward.settings.api_key: a key does not belong in a recipe: {ADVICE}")
    if has_secret(str(given.get("base_url", ""))):
        raise UserError(f"reward.settings.base_url contains a password or key: leave it out, and {ADVICE}")
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, ("reward.settings", *first["loc"])))
        said = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise UserError(f"{where}: {said.removeprefix('Value error, ')}") from None


def read_template(settings: JudgeSettings, default: Path) -> str:
    """Return the text of the prompt. Raises UserError for a file without the places that it needs."""
    path = default if settings.prompt_file is None else Path(settings.prompt_file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.settings.prompt_file: {quote(path)} cannot be read: {error}") from error
    if missing := [place for place in ("{reply}", "{verdict}") if place not in text]:
        raise UserError(f"reward.settings.prompt_file: {quote(path)} has no {missing[0]}: write it in its place")
    return text
