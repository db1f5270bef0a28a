"""Engines: token ids in, token ids out; one file an engine, found by its name or its path.

Imports modeling and trainers.weight_sync. Begin with base.py.
"""
