"""Models: load, attention, forward pass, head and export.

Imports core and configs. Begin with forward.py.
"""
