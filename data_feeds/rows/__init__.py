"""Files and hub data sets become records, and records become prompts or training samples.

Imports data_feeds.chat and data_feeds.images. Begin with row_types.py.
"""
