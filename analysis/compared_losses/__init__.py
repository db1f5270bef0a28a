"""Compared losses (key `compare_losses`), measured on the batches of the loss that trains.

Imports driver and the folders below it. Begin with observer.py, which the driver loads if a recipe has the key.
"""
