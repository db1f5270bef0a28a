"""Records of a run: folder, metrics, samples, terminal lines and trackers.

Imports core and configs. Begin with run_folder.py.
"""
