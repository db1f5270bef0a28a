"""Recorded training steps (step snapshots) and their replay under other losses.

Imports driver and what is below it. Begin with snapshot.py, the format of a snapshot.
"""
