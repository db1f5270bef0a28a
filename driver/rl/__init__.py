"""Reinforcement-learning runs: setup, and the calls that main_rl.py makes.

Imports driver.start, driver.checks and driver.records. Begin with run.py.
"""
