"""Chat templates, tokenizer and tool-call parsing: messages become token ids, and replies become messages.

Imports core, configs and modeling. Begin with tokenizer.py.
"""
