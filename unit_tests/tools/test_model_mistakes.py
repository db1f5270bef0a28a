"""Mistakes of models are planted by rule: in export plans, in the kernel of packed rows, and in routes."""

import pytest

from tools.device_mistakes import find_reason
from tools.model_mistakes import PARTS, REASONS, find_mistakes, list_mutants

PLANTED = {
    "x = a.transpose(0, 1)": ("dropped call", "x = a"),
    "x = attend(q, window=scores.window)": ("dropped score", "x = attend(q, window=None)"),
    "x = torch.cat([a, b])": ("swapped elements", "x = torch.cat([b, a])"),
    "x = a[b + c]": ("operator", "x = a[b - c]"),
}


@pytest.mark.parametrize("line", PLANTED)
def test_every_rule_plants_its_mistake(line):
    rule, want = PLANTED[line]
    # text that is not ASCII is longer in bytes than in letters
    source = f"é = 'é'\n{line}\n"
    assert [edit.apply(source).splitlines()[1] for edit in find_mistakes(source, [rule])] == [want]


def test_mistakes_are_planted_in_every_part():
    mutants = list_mutants("")
    pairs = {(part.file, rule) for part in PARTS for rule in part.rules}
    planted = {(m.file, rule) for m in mutants for _, rule in pairs if f" {rule}: " in m.breaks}
    assert planted == pairs
    explained = [f"{m.file}:{m.breaks}" for m in mutants if find_reason(m, REASONS)]
    assert all(any(part in place for place in explained) for part in REASONS), "no reason without its mistake"
