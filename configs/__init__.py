"""Schema of recipes, and the recipes themselves.

Imports core alone. Begin with schema.py, whose `RLConfig` and `SLConfig` hold the sections of the other files.
"""
