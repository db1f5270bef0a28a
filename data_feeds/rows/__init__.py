"""Files and hub data sets become records, and records become prompts or training samples.

Imports data_feeds.chat. Begin with row_types.py.
"""
