"""Plan of an algorithm's measures: which are computed in every forward pass, and which are columns of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from algs.base import Algorithm
from algs.teachers import LIVE, find_column
from core.errors import UserError
from core.types.measures import ENTROPY, Measure, list_teachers
from core.types.samples import ScoredColumn

PROX = "prox"
"""Name of the policy in training, for columns that are measures of the distribution at the start of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePlan:
    """Measures of a run by the forward pass that computes them."""

    live: Mapping[str, Measure]
    """Those that the loss reads as `policy.<name>`, entropy included."""
    columns: Mapping[str, Mapping[ScoredColumn, Measure]]
    """Columns of a step that are measures: of the policy (PROX), or of the frozen model of a column."""
    any: bool
    """Whether the algorithm has measures of its own."""


def plan_measures(alg: Algorithm) -> MeasurePlan:
    """Return the plan of the measures: the pass that computes each. Raises UserError for a name that nothing computes.

    Columns are named <model>.<measure>. A measure that `required_columns` names is computed before the update only.
    """
    who, measures, teachers = type(alg).__name__, alg.measures, alg.teachers
    if taken := sorted(measures.keys() & {"logp", "entropy", "measures", "apply", "list_tensors"}):
        raise UserError(f"{who}: a measure is named {taken[0]}, which policy.{taken[0]} means already: rename it")
    for name, measure in measures.items():
        if not isinstance(measure, Measure):  # a plain function, in a file of the user's
            raise UserError(f"{who}: the measure {name} is {measure!r:.60}: write Measure(function, teachers=(...))")
    whole = sorted(name for name, teacher in teachers.items() if not teacher.is_partial)
    frozen = [name for name in whole if teachers[name].model != LIVE and not teachers[name].moves]
    if unknown := [name for name in list_teachers(measures) if name not in frozen]:
        raise UserError(
            f"{who}: a measure reads the distribution of {unknown[0]!r}, and the teachers that rest and read what the "
            f"policy reads are {', '.join(frozen) or 'none'}: name it in teachers"
        )
    columns: dict[str, dict[ScoredColumn, Measure]] = {}
    for column in sorted(alg.required_columns):
        model, dot, name = column.rpartition(".")
        if not dot:
            _check_scored(alg, column)
        elif model not in (PROX, *whole) or name not in measures:
            known = ", ".join(f"{m}.{n}" for m in (PROX, *whole) for n in sorted(measures)) or "none"
            raise UserError(
                f"{who}: required_columns names {column!r}, which is no measure of a model: those are {known}"
            )
        else:
            columns.setdefault(model, {})[column] = measures[name]
    before = {column.rpartition(".")[2] for of_model in columns.values() for column in of_model}
    live = {name: measure for name, measure in measures.items() if name not in before}
    return MeasurePlan(live=(ENTROPY if alg.needs_entropy else {}) | live, columns=columns, any=bool(measures))


def list_read(alg: Algorithm) -> set[str]:
    """Return the columns that the algorithm requires, and the teachers whose distributions it reads."""
    of_models = {column.rpartition(".")[0] for column in alg.required_columns}
    return {*alg.required_columns, *of_models, *list_teachers(alg.measures)}


def _check_scored(alg: Algorithm, column: ScoredColumn) -> None:
    known = {"prox_logp", "values"} if alg.value_lr is not None else {"prox_logp"}
    known |= {find_column(name, teacher) for name, teacher in alg.teachers.items()}
    if column not in known:
        there = ", ".join(sorted(known))
        raise UserError(
            f"{type(alg).__name__}: required_columns names {column!r}, which no model computes: there are {there}, and "
            "every column of its teachers"
        )
