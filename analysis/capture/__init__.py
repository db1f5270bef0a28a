"""Recorded training steps (step snapshots) and their replay under other losses.

Imports driver and the folders below it. Begin with snapshot.py, the format of a snapshot.
"""
