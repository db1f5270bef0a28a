"""Tools of environments: Python functions and MCP servers.

Imports core and rollouts.envs.base. Begin with env.py.
"""
