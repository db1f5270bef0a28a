"""Supervised and preference runs: setup, and the calls that main_sl.py makes.

Imports driver.start, driver.checks and driver.records. Begin with run.py.
"""
