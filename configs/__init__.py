"""Schema of recipes, and the recipes themselves.

Imports only core. Begin with schema.py: `RLConfig` and `SLConfig` contain the sections of the other files.
"""
