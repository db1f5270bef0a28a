"""Offload of a colocated trainer to the CPU while the engine generates.

Imports core. Begin with offloaded_trainer.py.
"""
