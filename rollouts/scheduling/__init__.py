"""Scheduling of generation: replay buffer, staleness, and engines that fail, join or leave.

Imports core and configs. Begin with buffer.py.
"""
