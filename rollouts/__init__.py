"""Prompts become rewarded samples: engines, episodes, environments and agents.

Imports data_feeds, modeling, rewards and trainers.weight_sync. Begin with worker.py.
"""
