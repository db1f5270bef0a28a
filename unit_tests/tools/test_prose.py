"""Docstrings name the thing, and the documentation stays short."""

from tools import prose
from tools.layers import ROOT, product_files


def test_docstrings_have_few_vague_words():
    found = [docstring for file in product_files(ROOT) for docstring in prose.list_docstrings(ROOT, file)]
    rates = prose.count_vague_words(found)
    assert {word: rate for word, rate in rates.items() if rate > prose.GOALS[word]} == {}


def test_a_vague_docstring_is_counted():
    rates = prose.count_vague_words(
        [prose.Docstring(place="x.py:1", text="Return what keeps its ones, where there are.")]
    )
    assert rates == {"what": 125.0, "where": 125.0, "one, ones": 125.0, "its": 125.0}


def test_the_documentation_is_no_longer_than_its_limit():
    assert prose.count_doc_words(ROOT) <= prose.DOC_WORDS
