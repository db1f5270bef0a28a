"""Rows become prompts and samples; samples become batches.

Imports core, configs and modeling (image processors). Begin with feed.py, which draws rows.
"""
