"""Measurements whose numbers the documentation quotes; each is a program.

Imports anything. Begin with rl_vs_trl.py.
"""
