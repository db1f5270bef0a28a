"""Agents: programs of the user that talk to the policy by OpenAI's or Anthropic's protocols.

Imports the rest of rollouts, which works without it. Begin with episode.py.
"""
