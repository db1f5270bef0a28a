"""Checks of a recipe before anything starts.

Imports configs, modeling and data_feeds. Begin with engine.py; rl/setup.py shows the order.
"""
