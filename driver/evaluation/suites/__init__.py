"""The evaluation program: data-set suites and tables for main_eval.py.

Imports driver; nothing of a training run imports it. Begin with run.py.
"""
