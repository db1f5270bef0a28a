"""Several reward functions in one recipe: `reward.functions`, and `reward.by_source` for rows of one data source.

Parts are logged as `<function>.<part>`, so functions never share a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from core.loading import FileSpec
from rewards import RewardFn, RewardRun, check_reward, load_reward, prepare_reward, takes_run
from rewards.kinds import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """Reward function with the name in the recipe."""

    name: str
    spec: FileSpec
    settings: dict[str, Any]
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """Reward functions of a recipe, and the functions for each source. Small and picklable."""

    functions: tuple[NamedReward, ...]
    by_source: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Names of the functions for a source."""
    otherwise: tuple[str, ...] = ()
    """Names of the functions for every other source. "" is the single function of `reward.function`."""
    run: RewardRun = field(default_factory=RewardRun)

    @property
    def path(self) -> str:
        """Paths of the files, for error messages."""
        return ", ".join(f.spec.path for f in self.functions)

    @property
    def files(self) -> dict[str, FileSpec]:
        """Return every file by recipe key."""
        return {f"reward.functions.{f.name}" if f.name else "reward.function": f.spec for f in self.functions}

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of the functions, without repetition."""
        return sorted({f.kind for f in self.functions})

    @property
    def may_ask_judge(self) -> bool:
        """True if a function may ask the judge of the run: it gets the run, and has no address of its own."""
        return any(takes_run(f.spec) and "base_url" not in f.settings for f in self.functions)

    def list_names(self, source: str) -> tuple[str, ...]:
        """Return the names of the functions for a source's rows."""
        return self.by_source.get(source, self.otherwise)

    def select(self, kind: Kind) -> RewardPlan:
        """Return the functions of a kind; the names of a source's other functions are left out."""
        own = tuple(f for f in self.functions if f.kind == kind)
        named = {f.name for f in own}

        def keep(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name in named)

        by_source = {source: keep(names) for source, names in self.by_source.items()}
        return replace(self, functions=own, by_source=by_source, otherwise=keep(self.otherwise))

    def load(self) -> Mapping[str, RewardFn]:
        """Import the functions; return them by name. Raises UserError if the settings do not fit."""
        return {f.name: load_reward(f.spec, f.settings, self.run) for f in self.functions}

    def check(self, deadline_s: float) -> None:
        """Call every function's `check`. Raises UserError. deadline_s: reward.timeout_s."""
        for function in self.functions:
            check_reward(function.spec, function.settings, deadline_s, self.run)

    def prepare(self) -> None:
        """Call every function's `prepare`."""
        for function in self.functions:
            prepare_reward(function.spec, function.settings, self.run)
