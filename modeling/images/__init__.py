"""Vision-language models: image processors, image tokens and vision towers by family.

Imports core; modeling uses it only for models with a vision tower. Begin with processor.py.
"""
