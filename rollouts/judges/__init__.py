"""Judges that a run serves: an engine behind an OpenAI-compatible address, for rewards/judging.

Begin with endpoint.py, the HTTP server; worker.py is the engine of its own. An optional part: imported where a recipe
has `judge`.
"""
