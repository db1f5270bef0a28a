"""What an error of Ray's or of a collective means, in a clause for the user. Nothing here imports ray."""

from __future__ import annotations

from core.errors import shorten

DIED = "its process died; its log is in logs/ of the run folder (with ray_address in Ray's session folder)"
GONE = "its machine is gone, or the network to it"
NO_MEMORY = (
    "Ray ended its process because the machine's memory was nearly used up: lower trainer.micro_batch_tokens or "
    "rollout.kv_cache_gib, or end other programs"
)
_OF_A_MACHINE = ("node was terminated", "node has died", "is unavailable:")
"""Words of Ray's errors about an actor whose machine left the cluster or cannot be reached."""
_NOT_IMPORTED = "failed to import on the worker"
"""Words of Ray's error where an actor's process cannot import its class; a traceback follows them."""


def explain_death(error: BaseException) -> str:
    """Return a clause for an actor that cannot be called any more."""
    return GONE if any(words in str(error) for words in _OF_A_MACHINE) else DIED


def explain_import(error: BaseException | None) -> str:
    """Return why an actor's process cannot import our code; "" where it died of something else.

    >>> explain_import(RuntimeError("Actor failed to import on the worker.\\nTraceback ...\\nImportError: no torch"))
    'ImportError: no torch'
    """
    said = str(error)
    return shorten(said.strip().splitlines()[-1].strip()) if _NOT_IMPORTED in said else ""


def is_collective_failure(error: BaseException) -> bool:
    """Tell whether a collective lost a member or timed out; gloo raises a plain RuntimeError."""
    from torch.distributed import DistError

    return isinstance(error, DistError | ConnectionError) or (type(error) is RuntimeError and "gloo" in str(error))
