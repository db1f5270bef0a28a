"""Rows of tools/gpu_check.py, one file per kind. rows.py lists them; a check returns its numbers, or raises."""
