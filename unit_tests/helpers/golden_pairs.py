"""Preference rows of the first oracle, as groups of samples."""

from core.types.arrays import DOUBLE
from core.types.samples import Group, Prompt, Sample, make_sample
from unit_tests.helpers.examples import a_changed
from unit_tests.helpers.golden import GOLDEN, PREF


def answer(b: int, poison: float = 0.0) -> Sample:
    """Row b of the fixture: two prompt tokens before its answer, one token of another after it."""
    live = [t for t, m in enumerate(PREF["mask"][b]) if m]
    column = [poison, poison, *(PREF["ref"][b][t] for t in live), poison]
    return make_sample(
        dtype=DOUBLE,
        prompt=Prompt(id=str(b), messages=[]),
        token_ids=[5] * len(column),
        action_mask=[False, False, *[True] * len(live), False],
        rollout_logp=[poison] * len(column),
        versions=[-1] * len(column),
        reward=1.0 - b % 2,
        columns={"ref_logp": column, "prox_logp": [poison] * len(column)},
    )


def _by_itself(b: int, kl_sign: float, poison: float) -> Group:
    """For KTO: the row, and a mismatched answer of one token with the fixture's log-ratio."""
    ratio = kl_sign * (PREF["kto_kl_policy"][b] - PREF["kto_kl_ref"][b])
    columns = {"prox_logp": [poison, ratio], "ref_logp": [poison, 0.0]}
    wrong = {"token_ids": [5, 5], "action_mask": [False, True], "rollout_logp": [0.0] * 2, "versions": [-1] * 2}
    return [answer(b, poison), a_changed(answer(b), reward=None, columns=columns, **wrong)]


def first_pairs(name: str, poison: float = 0.0) -> list[Group]:
    if name.startswith("dpo/kto"):
        kl_sign = GOLDEN["cases"][name]["hyperparameters"]["kl_sign"]
        return [_by_itself(b, kl_sign, poison) for b in range(4)]
    return [[answer(0, poison), answer(1, poison)], [answer(2, poison), answer(3, poison)]]
