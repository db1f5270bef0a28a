"""Parts of the vLLM engine, in its own process and in vLLM's workers.

Imports vllm and trainers.weight_sync. Begin with common.py.
"""
