"""Weight sync: export, send, load and verify, over NCCL, gloo, IPC, files or the object store.

Imports core alone. Begin with publisher.py.
"""
