"""Recorded training steps (step snapshots) and their replay under other losses.

Imports trainers, algs and what is below them. Begin with snapshot.py, the format of a snapshot.
"""
