"""Checkpoints of trainers: weights, optimizer and random state of every rank.

Imports trainers' learners and core. Begin with state.py.
"""
