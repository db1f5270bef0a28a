"""The key `compare_losses`: losses that are measured on the batches of the one that trains.

Imports driver and what is below it. Begin with observer.py, which the driver loads where a recipe has the key.
"""
