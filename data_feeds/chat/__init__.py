"""Messages become token ids, and replies become messages again.

Imports core, configs and data_feeds.images. Begin with tokenizer.py.
"""
