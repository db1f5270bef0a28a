"""From recipe to run: checks, start, the steps of the loops, records and the end.

Imports everything below it; only main_*.py and analysis/ import it. Begin with rl/run.py.
"""
