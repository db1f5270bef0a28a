"""Text in files and terminals: UTF-8, atomic writes, secrets and control characters.

Imports core.errors only; plain_text.py, which that imports, nothing. Begin with text_files.py.
"""
