"""Processes of a run: workers in this process or on Ray, machines, failures, signals and clean-up.

Imports the rest of core; ray is imported here and nowhere else. Begin with workers.py.
"""
