"""Start of a private Ray cluster on this machine, which nobody but the run can reach; or connection to the user's.

Ray listens on all addresses, and whoever reaches it runs code. A private one listens on the loopback address, and takes
calls only with a token that other users of the machine cannot read.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from core.cluster.ray_address import FIX
from core.cluster.scratch import restore_environment
from core.errors import UserError, first_line, shorten
from core.patches import connect_to_ray_head, forget_ray_token, loopback_ray, quiet_ray
from core.timing.deadlines import ADDRESS_CHECK_TIMEOUT_S
from core.timing.timeouts import probe_with_timeout

TOKEN = "if it was started with a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
# By default Ray lowers its workers' priority. Older versions also hide all GPUs from an actor that reserves none, as
# colocated engines do.
SETTINGS = {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Variables of Ray, where the user has set none. Without the last it reports its use to its authors."""


def refuse_second_ray() -> None:
    """Raise UserError if this process is connected to a Ray cluster.

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
    """Set Ray's environment variables and silence its logs during the body; then restore the caller's state."""
    variables = {name: os.environ.get(name) for name in (*SETTINGS, "PYTHONBREAKPOINT")}
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        with quiet_ray():
            yield
    finally:
        restore_environment(variables)
        forget_ray_token()


def start_private_ray(folder: Path, environment: Mapping[str, str], **settings: Any) -> None:
    """Start a private Ray cluster with its session in `folder`, to which no other user has access.

    environment: variables of every process of the cluster.
    """
    import ray

    token = folder / "ray_token"
    # The mode is set at creation: before a later chmod, others could read the token.
    with open(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    # In the run's folder, because Ray's usual session folder is open to every user.
    names = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(folder), **environment}
    before = {name: os.environ.get(name) for name in (*names, "RAY_AUTH_TOKEN")}
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    os.environ.update(names)
    forget_ray_token()
    try:
        with loopback_ray():
            # without an address it would join whatever Ray runs on this machine
            ray.init(address="local", include_dashboard=False, **settings)
    finally:
        restore_environment(before)


def join_ray(address: str, **settings: Any) -> None:
    """Connect to the user's Ray cluster with the user's token. Raises UserError if it refuses."""
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
        raise UserError(f"ray_address={address}: Ray cannot join the cluster there: {said}; {TOKEN}; {FIX}") from error


def check_is_ray(address: str) -> None:
    """Raise UserError unless the head of a Ray cluster answers at host:port."""
    # Ray itself would retry for minutes on any other gRPC server.
    failure = probe_with_timeout(
        partial(connect_to_ray_head, address),
        timeout_s=ADDRESS_CHECK_TIMEOUT_S,
        silence=f"a gRPC server that is no head of a cluster gave no answer within {ADDRESS_CHECK_TIMEOUT_S:g} s",
    )
    if failure:
        raise UserError(f"ray_address={address}: no Ray cluster answers there ({failure}); {TOKEN}; {FIX}")
