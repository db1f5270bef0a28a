"""Tiny random models of today's architectures, and what FeynRL does with each: python -m tools.zoo

models.py makes them, stages.py has the checks, page.py writes docs/reference/models.md.
"""
