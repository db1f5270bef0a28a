"""Agents: programs of the user that talk to the policy over an OpenAI-compatible address.

Imports the rest of rollouts, which works without it. Begin with episode.py.
"""
