"""Environments: the other party of an episode; one file an environment.

Imports core and rollouts.tools. Begin with base.py.
"""
