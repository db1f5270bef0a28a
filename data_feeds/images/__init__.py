"""Images of rows: read, checked, and placed among the tokens.

Imports core and modeling.images. Begin with read_images.py.
"""
