"""Start of a private Ray cluster on this machine, which nobody but the run can reach; or connection to the user's.

Ray listens on all addresses, and whoever reaches it runs code. A private one listens on the loopback address, and takes
calls only with a token that other users of the machine cannot read.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.cluster.ray_address import MEND
from core.cluster.scratch import restore_environment
from core.errors import UserError, first_line, shorten
from core.replacing import replacing
from core.timing.deadlines import ADDRESS_CHECK_TIMEOUT_S
from core.timing.probe_with_timeout import probe_with_timeout

TOKEN = "if it was started with a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
LOGGERS = ("ray", "ray._private.worker")
"""Loggers of Ray in a driver; the second would say that it leaves SIGTERM to us."""
SETTINGS = {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Variables of Ray, where the user has set none."""

LEFT_OUT = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's Node that start its autoscaler, what copies logs to the terminal, and what reports usage to Ray's
authors. Nobody asks them anything here, and on two cores the start would wait 2 s for them."""


def refuse_second_ray() -> None:
    """Raise UserError where this process is connected to a Ray cluster.

    Ray holds one connection per process. The start of another one changes the token of the first, and Ray ends a
    process at once whose token is missing or wrong.
    """
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise UserError(
            "this process is connected to a Ray cluster already, and Ray allows one per process: call ray.shutdown() "
            "before the run, start the run in a process of its own, or set backend to local"
        )


@contextmanager
def borrowing_process() -> Generator[None]:
    """Set what a cluster needs in this process, and let Ray be quiet; afterwards all is as the caller had it."""
    worker: Any = importlib.import_module("ray._private.worker")
    variables = {name: os.environ.get(name) for name in (*SETTINGS, "PYTHONBREAKPOINT")}
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    shows_workers = worker._worker_logs_enabled
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    worker._worker_logs_enabled = False  # else Ray prints a paragraph about each dead actor
    try:
        yield
    finally:
        worker._worker_logs_enabled = shows_workers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        restore_environment(variables)
        forget_token()


def start_private_ray(folder: Path, environment: Mapping[str, str], **settings: Any) -> None:
    """Start Ray with its session in `folder`, where nobody else may look: Ray lets everybody write into its own.

    environment: variables of every process of the cluster.
    """
    import ray

    token = folder / "ray_token"
    with open(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    names = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **environment}
    before = {name: os.environ.get(name) for name in (*names, "RAY_AUTH_TOKEN")}
    constants: Any = importlib.import_module("ray._private.ray_constants")
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    os.environ.update(names)
    forget_token()
    node: Any = importlib.import_module("ray._private.node").Node
    loopback = replacing(constants, ENABLE_RAY_CLUSTER=False)  # Ray's way to choose it
    try:
        with loopback, replacing(node, **dict.fromkeys(LEFT_OUT, _start_nothing)):
            # without an address it would join whatever Ray runs on this machine
            ray.init(address="local", _temp_dir=str(folder / "ray"), include_dashboard=False, **settings)
    finally:
        restore_environment(before)


def _start_nothing(*_: Any, **__: Any) -> None:
    pass


def join_ray(address: str, **settings: Any) -> None:
    """Connect to a cluster of the user's, with the user's token. Raises UserError where it refuses."""
    import ray
    from ray.exceptions import AuthenticationError

    try:
        ray.init(address=address, **settings)
    except AuthenticationError as error:
        raise UserError(
            f"ray_address={address}: the cluster there refuses this run ({first_line(error)}); {TOKEN}"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # another version of Ray or Python, say
        said = shorten(" ".join(str(error).split()))
        raise UserError(f"ray_address={address}: Ray cannot join the cluster there: {said}; {TOKEN}; {MEND}") from error


def check_is_ray(address: str) -> None:
    """Raise UserError where the server at host:port does not name a cluster: Ray itself would ask for minutes."""
    of_ray: Any = importlib.import_module("ray._raylet")

    def ask() -> None:
        of_ray.GcsClient(address=address)

    failure = probe_with_timeout(
        ask,
        timeout_s=ADDRESS_CHECK_TIMEOUT_S,
        silence=f"a gRPC server that is no head of a cluster gave no answer within {ADDRESS_CHECK_TIMEOUT_S:g} s",
    )
    if failure:
        raise UserError(f"ray_address={address}: no Ray cluster answers there ({failure}); {TOKEN}; {MEND}")


def forget_token() -> None:
    """Let Ray read token and mode from the environment again; it keeps both."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
