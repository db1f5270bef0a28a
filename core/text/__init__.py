"""Text in files and terminals: UTF-8, atomic writes, secrets and control characters.

Imports core.errors only. Begin with text_files.py.
"""
