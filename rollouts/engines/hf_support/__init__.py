"""Parts of the hf engine. Imports modeling. Begin with rows.py."""
