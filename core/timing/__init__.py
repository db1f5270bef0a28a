"""Time: deadlines, phases, the clock, and limits on code that blocks.

Imports core.errors only. Begin with deadlines.py, which lists every deadline.
"""
