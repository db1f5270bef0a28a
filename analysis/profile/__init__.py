"""Traces of trainers and engines for some steps of a run: the key `profile`."""
