"""Packing: samples become batches, with token weights, the label shift, and the split into micro-batches.

Imports core alone. Begin with batches.py.
"""
