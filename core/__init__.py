"""The ground floor: types that flow, processes, text, deadlines, errors, plug-ins and metric names.

Imports no other folder of ours. Begin with types/samples.py.
"""
