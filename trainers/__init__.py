"""Trainers: one training step on one process, DeepSpeed or FSDP2, and weight sync to the engines.

Imports algs, modeling, data_feeds.packing and core. Begin with trainer.py.
"""
