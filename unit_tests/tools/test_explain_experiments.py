"""Memory of the reference experiments: the page has the code's figures, and a run that cannot fit ends the program."""

import pytest

from core.errors import UserError
from tools import explain_experiments
from tools.explain_experiments import EXPERIMENTS, MADE, PAGE, insert, make_table

pytestmark = pytest.mark.one_core


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(EXPERIMENTS)))])
def test_the_page_has_the_figures_of_explain(number):
    page = PAGE.read_text().splitlines()
    table = make_table(EXPERIMENTS[number : number + 1]).splitlines()
    assert [line for line in table if line not in page] == [], "run: python -m tools.explain_experiments --write"


def test_an_experiment_that_does_not_fit_its_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(explain_experiments, "GPU_GIB", 24.0)
    with pytest.raises(UserError, match=r"training takes .* of the 24\.00 GiB of a GPU"):
        make_table(EXPERIMENTS[:1])


def test_a_new_table_takes_the_place_of_the_old():
    page = f"# Title\n\n{MADE}\n\n| old |\n| 1 |\n\n## Next\n"
    new = f"# Title\n\n{MADE}\n\n| new |\n\n## Next\n"
    assert insert(page, "| new |") == new == insert(new, "| new |")
