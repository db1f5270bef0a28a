"""vLLM plugin that registers our weight-transfer engines in every process of vLLM."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import cache
from importlib.metadata import entry_points
from threading import Thread

from core.cluster.scratch import name_shared_memory
from core.errors import UserError
from core.timing.deadlines import PARENT_POLL_S

GROUP, NAME = "vllm.general_plugins", "feynrl"
"""Entry point of this plugin, which pyproject.toml declares and the installation writes."""


def require_plugin() -> None:
    """Raise UserError if vLLM would not find this plugin, because FeynRL is imported from a folder alone."""
    if not entry_points(group=GROUP, name=NAME):
        raise UserError(
            "rollout.engine: vllm needs FeynRL to be installed, because vLLM finds the receiver of weights by an entry "
            "point: run `python -m pip install --no-deps --editable .` in FeynRL's folder"
        )


@cache
def register() -> None:
    """Register the engines. Cached, since vLLM may call this several times per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    _end_with_parent()
    name_shared_memory()
    import rollouts.engines.vllm_support.int8_config  # noqa: F401  registers the method
    from rollouts.engines.vllm_support.patches import replace_expand, replace_rotation

    replace_expand()
    replace_rotation()

    transports = {"feynrl_gloo": "GlooTransfer", "feynrl_nccl": "NcclTransfer", "feynrl_ipc": "IpcTransfer"}
    for name, cls in transports.items():
        Factory.register_engine(name, "rollouts.engines.vllm_support.worker", cls)


def _end_with_parent() -> None:
    """End this process, started by vLLM, after its parent has died. It would survive a kill of the parent."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    pid = parent.pid

    def watch_parent() -> None:
        while os.getppid() == pid:
            time.sleep(PARENT_POLL_S)
        # not sys.exit, which would end only this thread
        os._exit(1)

    Thread(target=watch_parent, daemon=True, name="end with parent").start()
