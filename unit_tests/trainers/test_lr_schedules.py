"""Learning rates against their closed forms, update by update."""

from __future__ import annotations

import math

import pytest

from configs.trainer_schema import TrainerConfig
from trainers.optimizer import make_lr_schedule

TOTAL, WARMUP, LR = 50, 5, 0.3


def rates(**settings) -> list[float]:
    cfg = TrainerConfig(**{"lr": LR, "warmup_updates": WARMUP} | settings)
    return [*map(make_lr_schedule(cfg, TOTAL), range(TOTAL + 1))]


def after_warmup(form) -> list[float]:
    return [LR * (u + 1) / WARMUP if u < WARMUP else LR * form(u) for u in range(TOTAL + 1)]


def test_rates_without_decay_are_constant_and_without_warm_up_fall_at_once():
    assert rates() == after_warmup(lambda u: 1.0)
    assert rates(lr_schedule="linear", warmup_updates=0) == pytest.approx([LR * (1 - u / TOTAL) for u in range(51)])
    assert rates(lr_schedule="linear", warmup_updates=TOTAL)[-2:] == [LR, LR], "a warm-up as long as the run"


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_linear_and_cosine_end_at_the_floor(floor):
    def progress(u):
        return (u - WARMUP) / (TOTAL - WARMUP)

    linear = rates(lr_schedule="linear", lr_min_fraction=floor)
    assert linear == pytest.approx(after_warmup(lambda u: 1 - (1 - floor) * progress(u)))
    cosine = rates(lr_schedule="cosine", lr_min_fraction=floor)
    assert cosine == pytest.approx(
        after_warmup(lambda u: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress(u))))
    )
    assert linear[TOTAL] == pytest.approx(floor * LR) and cosine[TOTAL] == pytest.approx(floor * LR)


@pytest.mark.parametrize(("fraction", "updates"), [(0.2, 10), (0.9, 45), (0.01, 1), (0.17, 8)])
def test_wsd_is_stable_and_then_falls_in_its_last_updates(fraction, updates):
    found = rates(lr_schedule="wsd", decay_fraction=fraction, lr_min_fraction=0.1)
    start = TOTAL - updates
    assert found == pytest.approx(after_warmup(lambda u: 1.0 if u < start else 1 - 0.9 * (u - start) / updates))
    assert found[TOTAL] == pytest.approx(0.1 * LR) and found[start] == LR


REFUSED = {
    "a floor without a fall": ({"lr_min_fraction": 0.1}, "lr_schedule is constant"),
    "wsd without its key": ({"lr_schedule": "wsd"}, "set decay_fraction"),
    "the key of wsd": ({"lr_schedule": "linear", "decay_fraction": 0.5}, "belongs to lr_schedule: wsd"),
    "too many updates": (
        {"lr_schedule": "wsd", "decay_fraction": 1.0, "warmup_updates": 1},
        "trainer.warmup_updates=1 and the 2 updates of trainer.decay_fraction=1.0 are more than the 2 updates",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schedule_that_does_not_fit_is_refused(name, refused):
    trainer, words = REFUSED[name]
    refused({f"trainer.{key}": value for key, value in trainer.items()}, "trainer", words)


def test_the_rates_of_epochs_are_checked_when_their_steps_are_known(refused):
    """15 rows of 5 a step: three updates."""
    changes = {"steps": None, "epochs": 1, "trainer.lr_schedule": "wsd", "trainer.decay_fraction": 1.0}
    refused(changes | {"trainer.warmup_updates": 1}, "more than the 3 updates", kind="sl")
