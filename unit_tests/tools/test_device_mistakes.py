"""Device mistakes are planted by rule: every place of the hot path that moves or makes a tensor."""

import ast

import pytest

from tools import device_mistakes
from tools.device_mistakes import REASONS, RULES, find_mistakes, find_reason, list_mutants

PLANTED = {
    "x = torch.ones(3, device=x.device)": [("named", "x = torch.ones(3, device='cpu')")],
    "x = Head(3, device='meta')": [],
    "x = find(y, x.device)": [("passed", "x = find(y, 'cpu')")],
    "x = (a + b).to(device)": [("moved", "x = (a + b)")],
    "x = a.to(torch.int64)": [],
    "x = a.b().cpu().numpy()": [("fetched", "x = a.b().numpy()")],
    "x = a.new_zeros(3)": [("like", "x = a.new_zeros(3, device='cpu')")],
    "x = torch.ones_like(a)": [("like", "x = torch.ones_like(a, device='cpu')")],
    "x = np.ones_like(a)": [],
    "x = torch.tensor([1])": [("made", "x = torch.tensor([1], device='cuda')")],
}


@pytest.mark.parametrize("line", PLANTED)
def test_every_rule_plants_its_mistake(line):
    # text that is not ASCII is longer in bytes than in letters
    found = [(rule, text.splitlines()[1]) for _, rule, text in find_mistakes(f"é = 'é'\n{line}\n")]
    assert found == PLANTED[line]


def test_mistakes_are_planted_all_over_the_hot_path():
    mutants = list_mutants("")
    for mutant in mutants:
        assert mutant.new != mutant.old and ast.dump(ast.parse(mutant.new))
    assert {rule for m in mutants for rule in RULES if f"({rule})" in m.breaks} == {*RULES}
    assert len({m.file for m in mutants}) > 12
    explained = [m for m in mutants if find_reason(m)]
    assert all(any(part in m.breaks for m in explained) for part in REASONS), "no reason without its mistake"


def test_a_path_of_no_file_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["device_mistakes", "--only", "typo"])
    with pytest.raises(SystemExit, match="2"):
        device_mistakes.choose("", "device_mistakes", list_mutants, REASONS)
    assert "--only typo: no file of the list" in capsys.readouterr().err


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_the_pretend_device_notices_them(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["device_mistakes"])
    with pytest.raises(SystemExit) as ended:
        device_mistakes.choose("", "device_mistakes", list_mutants, REASONS)
    assert ended.value.code == 0, capsys.readouterr().out
