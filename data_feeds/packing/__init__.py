"""Samples become batches: token weights, the one label shift, and the cut into micro-batches.

Imports core alone. Begin with batches.py.
"""
