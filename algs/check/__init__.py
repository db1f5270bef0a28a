"""Proof obligations of an algorithm, run on a CPU in seconds.

Imports algs, data_feeds and core. Begin with checker.py, which `python -m algs.check` runs.
"""
