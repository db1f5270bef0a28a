"""Boxes: places for the commands of a policy, whose files stay between commands. One box per episode.

    box = await open_box("bubblewrap", BoxSpec(image="images/mine@sha256:..."))
    ran = await box.run(["sh", "-c", "ls /app"], seconds=30)
    await box.close()

bubblewrap needs no daemon, and works on an unpacked image (rollouts/boxes/images.py). podman, docker and apptainer are
driven by their command lines (rollouts/boxes/programs.py).
"""

from __future__ import annotations

import asyncio

from core.errors import UserError, quote
from rewards.sandbox import SandboxUnavailable
from rollouts.boxes.base import Box, BoxSpec, check_variables, is_text
from rollouts.boxes.bubblewrap import BubblewrapBox, check_bubblewrap
from rollouts.boxes.containers import ContainerBox, check_program
from rollouts.boxes.programs import PROGRAMS

__all__ = ["Box", "BoxSpec", "check_boxes", "open_box"]

BUBBLEWRAP = "bubblewrap"


async def open_box(backend: str, spec: BoxSpec) -> Box:
    """Start a box. The caller must close it.

    Raises UserError for an image or a variable that cannot be used, and SandboxUnavailable if the start fails.
    """
    check_variables(spec.environment, "a box")
    if not is_text(spec.folder + spec.image):
        raise UserError(
            f"the image {quote(spec.image)} or the working folder {quote(spec.folder)} is no name of a file"
        )
    if backend == BUBBLEWRAP:
        return await BubblewrapBox.open(spec)
    return await ContainerBox.open(PROGRAMS[_check_name(backend)], spec)


def check_boxes(backend: str) -> None:
    """Raise UserError, with the fix, if boxes cannot be started here."""
    try:
        if backend == BUBBLEWRAP:
            asyncio.run(check_bubblewrap())
        else:
            check_program(PROGRAMS[_check_name(backend)])
    except SandboxUnavailable as error:
        raise UserError(str(error)) from error


def _check_name(backend: str) -> str:
    if backend not in PROGRAMS:
        known = ", ".join([BUBBLEWRAP, *PROGRAMS])
        raise UserError(f"there are no boxes of {quote(backend)}: choose one of {known}")
    return backend
