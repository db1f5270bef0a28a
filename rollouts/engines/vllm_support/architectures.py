"""Architectures that vLLM supports, queried in a separate process: importing vLLM is slow and needs settings."""

from __future__ import annotations

import subprocess
import sys

from core.errors import RunStopped
from core.timing.deadlines import VLLM_IMPORT_TIMEOUT_S

CODE = """
import sys
from vllm.model_executor.models.registry import ModelRegistry
print("vLLM has it:", sys.argv[1] in ModelRegistry.get_supported_archs())
"""


def has_architecture(name: str) -> bool:
    """Return whether vLLM supports an architecture. Raises RunStopped if vLLM cannot be imported."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", CODE, name], capture_output=True, text=True, timeout=VLLM_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as late:
        raise RunStopped(f"vLLM could not be imported within {VLLM_IMPORT_TIMEOUT_S:g} s") from late
    # importing vLLM may print other text
    answer = asked.stdout.rpartition("vLLM has it: ")[2].strip()
    if asked.returncode != 0 or answer not in ("True", "False"):
        raise RunStopped(f"vLLM cannot be imported: {(asked.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    return answer == "True"
