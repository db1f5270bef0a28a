"""Images of rows: loaded, validated, and mapped to tokens.

Imports core and modeling.images. Begin with read_images.py.
"""
