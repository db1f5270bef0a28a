"""Protocols that agents' clients speak: a file each, which translates to and from rollouts/agents/wire.py.

Imports wire.py and nothing of the session or the HTTP server. Begin with chat.py.
"""
