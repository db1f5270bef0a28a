"""Several reward functions in one recipe: `reward.functions`, and `reward.by_source` for rows of one data source.

Parts are logged as `<function>.<part>`, so functions never share a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.loading import FileSpec
from rewards import check_reward, load_reward, prepare_reward

if TYPE_CHECKING:
    from core.types.samples import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """Reward function with its name in the recipe."""

    name: str
    spec: FileSpec
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """Reward functions of a recipe, and the functions for each source. Small and picklable."""

    functions: tuple[NamedReward, ...]
    by_source: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Names of the functions for a source."""
    otherwise: tuple[str, ...] = ()
    """Names of the functions for every other source. "" is the single function of `reward.function`."""

    @property
    def path(self) -> str:
        """Paths of the files, for error messages."""
        return ", ".join(f.spec.path for f in self.functions)

    @property
    def files(self) -> dict[str, FileSpec]:
        """Return every file by recipe key."""
        return {f"reward.functions.{f.name}" if f.name else "reward.function": f.spec for f in self.functions}

    def load(self) -> Callable[[Prompt, list[Message]], dict[str, float]]:
        """Import the functions. Return a function that calls those of the prompt's source.

        Raises UserError if the settings do not fit.
        """
        scores = {f.name: load_reward(f.spec, f.settings) for f in self.functions}
        # a single function: its parts keep their names
        if [*scores] == [""]:
            return scores[""]

        def score(prompt: Prompt, messages: list[Message]) -> dict[str, float]:
            parts: dict[str, float] = {}
            for name in self.by_source.get(prompt.source, self.otherwise):
                given = scores[name](prompt, messages)
                # the worker checks only the merged parts, in which an empty dict would go unnoticed
                if not isinstance(given, dict) or not given:
                    raise TypeError(f"score() of {name or 'the reward'} must return a dict of named numbers: {given!r}")
                parts |= {f"{name}.{part}" if name else part: value for part, value in given.items()}
            return parts

        return score

    def check(self, deadline_s: float) -> None:
        """Call every function's `check`. Raises UserError. deadline_s: reward.timeout_s."""
        for function in self.functions:
            check_reward(function.spec, function.settings, deadline_s)

    def prepare(self) -> None:
        """Call every function's `prepare`."""
        for function in self.functions:
            prepare_reward(function.spec, function.settings)
