"""Data sets and batches: rows become prompts and samples, and samples become batches.

Imports core, configs and modeling (image processors). Begin with feed.py, which draws rows.
"""
