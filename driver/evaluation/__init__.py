"""Evaluation: held-out reward during a run, estimators and intervals, and suites of data sets.

Imports rollouts and the rest of driver. Begin with evaluator.py.
"""
