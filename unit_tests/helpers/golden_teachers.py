"""Cases of the second oracle whose loss reads a teacher: the groups as the driver gives them to an algorithm."""

from core.types.samples import Group
from unit_tests.helpers.examples import a_changed
from unit_tests.helpers.golden2 import CASES2, RL2, rl_groups


def graded(name: str, poison: float) -> list[Group]:
    """The oracle's groups with the column of their teacher, as the driver adds it."""
    has_teacher = iter(CASES2[name].get("extra", {}).get("has_teacher", [1] * 8))
    rows = iter(range(8))
    found: list[Group] = []
    for group in rl_groups(None, poison):
        found.append([])
        for sample in group:
            b = next(rows)
            key = "priv" if name.startswith("self/") else "tea"
            if name.startswith("opd/by_source"):
                key = ("tea", "tea2")[RL2["source"][b]]
            given = [x if m else poison for x, m in zip(RL2[key][b], RL2["mask"][b], strict=True)]
            columns = {"prox_logp": sample.columns["prox_logp"], "teacher_logp": [poison, poison, *given]}
            if name == "self/rows_without_teacher":  # one update per step, and so no ratio
                del columns["prox_logp"]
            if next(has_teacher):
                found[-1].append(a_changed(sample, columns=columns))
            else:
                found[-1].append(a_changed(sample, columns={}, excluded=[True] * len(sample.token_ids)))
    return found
