"""Types that flow through a step: Prompt -> Sample -> Batch -> (Policy, Tokens).

Imports core.errors and core.text. Begin with samples.py.
"""
