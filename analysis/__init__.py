"""Tools that look at runs: recorded steps, compared losses, the run page and the doctor.

Imports everything below it; no step of training imports it. Begin with capture/observer.py.
"""
