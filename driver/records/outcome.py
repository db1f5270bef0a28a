"""Result of a run in the terminal: held-out metrics before and after training, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driver.early_stop import EarlyStop
from driver.records.console import Console
from driver.records.run_result import list_held_out
from driver.records.time_account import describe_shares


def show_outcome(console: Console, facts: Mapping[str, Any], *, early_stop: EarlyStop, of: int) -> None:
    """Print the table of held-out metrics, the shares of time, and what stop_when did.

    facts: contents of summary.json. of: steps of the recipe.
    """
    held_out = list_held_out(facts.get("before", {}), facts.get("after", {}))
    if rows := [(name, f"{before:.3f}", f"{after:.3f}") for name, before, after in held_out]:
        console.show_table("on held-out data", rows, ("", "before", "after"))
    if devices := facts.get("devices"):
        for line in (*describe_shares(devices), facts["bottleneck"]):
            console.say(line)
    if early_stop.reason:
        console.say(f"ended after {facts['steps_done']} of {of} steps: {early_stop.reason}")
    elif unlogged := early_stop.describe_unlogged():
        console.say(unlogged)
