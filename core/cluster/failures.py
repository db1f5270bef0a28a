"""Explain errors of Ray and of collectives to the user, as clauses. Does not import ray."""

from __future__ import annotations

from core.errors import shorten

DIED = "its process died; its log is in logs/ of the run folder (with ray_address in Ray's session folder)"
GONE = "its machine is gone, or the network to it"
NO_MEMORY = (
    "Ray ended its process because the machine's memory was nearly used up: lower trainer.micro_batch_tokens or "
    "rollout.kv_cache_gib, or end other programs"
)
_OF_A_MACHINE = ("node was terminated", "node has died", "is unavailable:")
"""Phrases in Ray's errors about an actor whose machine left the cluster or is unreachable."""
_NOT_IMPORTED = "failed to import on the worker"
"""Phrase in Ray's error if a process cannot import the actor's class; a traceback follows."""


def explain_death(error: BaseException) -> str:
    """Return a clause for an actor that is gone."""
    return GONE if any(words in str(error) for words in _OF_A_MACHINE) else DIED


def explain_import(error: BaseException | None) -> str:
    r"""Return why an actor's process cannot import our code; "" for another cause of death.

    >>> explain_import(RuntimeError("Actor failed to import on the worker.\nTraceback ...\nImportError: no torch"))
    'ImportError: no torch'
    """
    said = str(error)
    return shorten(said.strip().splitlines()[-1].strip()) if _NOT_IMPORTED in said else ""


def is_collective_failure(error: BaseException) -> bool:
    """Tell whether a collective lost a member or timed out. gloo raises a plain RuntimeError then."""
    from torch.distributed import DistError

    # Exactly RuntimeError: subclasses, such as torch's OutOfMemoryError, have causes of their own.
    return isinstance(error, DistError | ConnectionError) or (type(error) is RuntimeError and "gloo" in str(error))
