"""Tests, in folders that mirror the product's: the test of core/loading.py is core/test_loading.py.

helpers/ holds what several tests share, data/ the rows and numbers that they read, and no test imports another.
Begin with conftest.py, whose fixtures write a small recipe, run it, or check that it is refused.
"""
