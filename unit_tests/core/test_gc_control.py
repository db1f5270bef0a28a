"""Garbage collection of a run: seldom while it runs, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from core.gc_control import ENGINE, SELDOM, collect_seldom, collecting_seldom, without_gc


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()
    if frozen:
        gc.freeze()  # as for the other tests


def test_a_run_collects_seldom_and_afterwards_as_before():
    gc.unfreeze()
    gc.set_threshold(500, 5, 6)
    with pytest.raises(KeyError), collecting_seldom(True):
        assert gc.get_threshold() == SELDOM and gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_threshold() == (500, 5, 6) and gc.get_freeze_count() == 0
    with collecting_seldom(False):
        assert gc.get_threshold() == (500, 5, 6) and gc.get_freeze_count() == 0


def test_an_engines_process_collects_seldom_and_never_what_was_there():
    gc.unfreeze()
    collect_seldom()
    assert gc.get_threshold() == ENGINE and gc.get_freeze_count() > 1000
    gc.unfreeze()


@pytest.mark.parametrize("is_on", [True, False])
def test_collection_is_off_for_a_while_and_then_as_the_caller_had_it(is_on: bool):
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(KeyError), without_gc():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == is_on
