"""Judges: models behind an OpenAI-compatible address that score replies.

Begin with judge.py, which asks for a verdict with votes, retries and a cache. rewards/judge.py and rewards/rubric.py
are the rewards. Imports core and rewards.
"""
