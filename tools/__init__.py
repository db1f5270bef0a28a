"""Programs for those who work on FeynRL: install, layers, generated pages, planted bugs, benchmarks.

Imports anything; nothing of a run imports it. Begin with layers.py.
"""
