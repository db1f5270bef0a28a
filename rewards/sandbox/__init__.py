"""Sandboxes for untrusted code of a policy. docs/how_to/code_rewards.md states the guarantees.

    box = make_sandbox("bubblewrap")                       on this machine, by bwrap
    box = make_sandbox("http://sandbox.example:8080")      on another, over SandboxFusion's POST /run_code
    ran = await box.run(["python3", "main.py"], files={"main.py": b"print(1)"}, limits=Limits(seconds=5))

Code never runs without a sandbox.
"""

from __future__ import annotations

import asyncio

from core.errors import UserError
from rewards.sandbox.base import Limits, Ran, Sandbox, SandboxUnavailable
from rewards.sandbox.bubblewrap import Bubblewrap
from rewards.sandbox.remote import HttpSandbox

__all__ = [
    "Bubblewrap",
    "HttpSandbox",
    "Limits",
    "Ran",
    "Sandbox",
    "SandboxUnavailable",
    "check_sandbox",
    "make_sandbox",
]


def make_sandbox(name_or_url: str) -> Sandbox:
    """Return the sandbox of a name or URL. Raises UserError for any other value."""
    if name_or_url == "bubblewrap":
        return Bubblewrap()
    if name_or_url.startswith(("http://", "https://")):
        return HttpSandbox(name_or_url)
    raise UserError(
        f"the sandbox {name_or_url!r:.200} is neither bubblewrap nor the address of a server (http://...): choose one"
    )


def check_sandbox(name_or_url: str) -> None:
    """Raise UserError, with the fix, if the sandbox cannot run code."""
    try:
        asyncio.run(make_sandbox(name_or_url).check())
    except SandboxUnavailable as error:
        raise UserError(str(error)) from error
