"""Samplers: rules that choose the rows of the next steps from earlier results. One file each, found by name or path.

Begin with base.py. `data.sampler` of a recipe names one; without it every row comes once per pass.
"""
