"""Factories that start trainers, engines and weight sync from a recipe.

Imports trainers, rollouts and core.cluster. Begin with trainers.py.
"""
