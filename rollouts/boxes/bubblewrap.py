"""Box by bubblewrap: programs of an image, read-only, and folders of its own that stay between commands.

Each command is a sandbox of rewards/sandbox/bubblewrap.py, so no process outlives its command. The folders WRITABLE,
and that of the working folder, are copies that may be changed; all else is read-only. So a policy cannot replace the
programs of the image, but for those in such folders: rollouts/envs/harbor.py keeps a verifier from these. Commands run
as an unprivileged user, even if the image expects root. The processor is not limited. A killed run leaves its folders
box-* in the folder for temporary files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from core.errors import UserError, quote
from rewards.sandbox.base import MIB, Limits, Ran, SandboxUnavailable, check_names, last_line
from rewards.sandbox.bubblewrap import FORBIDDEN, Bubblewrap, View, draw_user, mount_system
from rewards.sandbox.running import find_excess
from rewards.sandbox.usage import measure_folders
from rollouts.boxes.base import PATH, WRITABLE, BoxSpec, order_path
from rollouts.boxes.images import HOST, Image, prepare_image

SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr", "var")
"""Folders of the root that cannot be the working folder's."""
OF_NETWORK = ("resolv.conf", "hosts")
"""Files of this machine's /etc in a box with the network."""
CERTIFICATES = "/etc/ssl/certs"
OVER = {
    "disk": "the box has more than {disk_mib} MiB of files besides the image's",
    "files": "the box has more than {files} files besides the image's",
}
"""Limits of which an excess stays."""


class BubblewrapBox:
    """Box on this machine."""

    def __init__(self, image: Image, spec: BoxSpec, home: Path) -> None:
        """home: empty folder, for the writable folders."""
        self.broken = ""
        self._spec, self._home = spec, home
        self._folder = spec.folder or image.folder
        self._user = draw_user() if os.getuid() == 0 else None
        names = {*WRITABLE, *PurePosixPath(self._folder).parts[1:2]}
        for name in names:
            self._make_folder(name, image.root)
        make_folders(home, self._folder)
        self._own(home)
        (home / "tmp").chmod(0o1777)
        size, files = measure_folders([home])
        limits = spec.limits
        # the image's own files do not count
        self._limits = replace(limits, disk_mib=limits.disk_mib + -(-size // MIB), files=limits.files + files)
        self._mounts = (*mount_image(image.root, names, network=spec.network), *self._bind(sorted(names)))
        self._environment = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"} | {**image.environment}
        self._environment |= spec.environment
        self.path = order_path(self._environment["PATH"], names, image.root or Path("/"))

    @classmethod
    async def open(cls, spec: BoxSpec) -> BubblewrapBox:
        """Return a box of an image. Raises UserError if it cannot be used."""
        # files of an image may be many: the episodes of this process go on meanwhile
        image = await asyncio.to_thread(prepare_image, spec.image)
        place = PurePosixPath(spec.folder or image.folder)
        top = place.parts[1:2]
        if not place.is_absolute() or ".." in place.parts:
            raise UserError(f"the working folder {quote(str(place))} of a box must be an absolute path without ..")
        if top and top[0] in SYSTEM:
            raise UserError(
                f"the working folder {quote(str(place))} is read-only in a box of bubblewrap: choose "
                "/app or /workspace, or use podman"
            )
        home = Path(tempfile.mkdtemp(prefix="box-"))
        making = asyncio.create_task(asyncio.to_thread(cls, image, spec, home))
        try:
            return await asyncio.shield(making)
        except BaseException:
            # on cancellation the thread goes on to copy
            await asyncio.wait([making])
            await asyncio.to_thread(remove_tree, home)
            raise

    async def run(self, command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Ran:
        given = self._environment | {**(environment or {})}
        # the programs that start the command have more rights, so they come from the image's own folders
        late = {name: value for name, value in given.items() if name == "PATH" or name.startswith("LD_")}
        command = ["env", *(f"{name}={value}" for name, value in late.items()), *command]
        view = View(
            mounts=self._mounts,
            folder=await asyncio.to_thread(self._find_folder),
            environment={name: value for name, value in given.items() if name not in late} | {"PATH": PATH},
            network=self._spec.network,
            user=self._user,
            writable=(self._home,),
        )
        running = await Bubblewrap().open(command, limits=replace(self._limits, seconds=seconds), view=view)
        ran = await running.finish(b"")
        excess = await asyncio.to_thread(find_excess, [self._home], self._limits)
        if excess is not None:
            limits = self._spec.limits
            self.broken = OVER[excess].format(disk_mib=limits.disk_mib, files=limits.files)
        return ran

    async def put(self, folder: str, files: Mapping[str, bytes]) -> None:
        check_names(files)
        await asyncio.to_thread(self._put, self._home / folder.lstrip("/"), files)

    async def get(self, path: str, *, most: int) -> bytes | None:
        return await asyncio.to_thread(self._get, path, most)

    async def stop_processes(self) -> None:
        """Do nothing: no process outlives its command."""

    async def close(self) -> None:
        await asyncio.to_thread(remove_tree, self._home)

    def _make_folder(self, name: str, root: Path | None) -> None:
        """Make a writable folder, with the files of the image."""
        given = None if root is None else root / name
        if given is not None and given.is_dir() and not given.is_symlink():
            shutil.copytree(given, self._home / name, symlinks=True)
            make_writable(self._home / name)
        else:
            (self._home / name).mkdir()

    def _own(self, top: Path) -> None:
        """Give files to the user of the commands. A link's target keeps its owner."""
        if self._user is not None:
            for folder, names, files in os.walk(top):
                for path in (folder, *(f"{folder}/{name}" for name in (*names, *files))):
                    os.chown(path, self._user, self._user, follow_symlinks=False)

    def _bind(self, names: Sequence[str]) -> list[str]:
        return [part for name in names for part in ("--bind", str(self._home / name), f"/{name}")]

    def _put(self, folder: Path, files: Mapping[str, bytes]) -> None:
        # of a folder that commands have filled, nothing stays: a link would lead elsewhere
        remove_tree(folder)
        folder.mkdir()
        for name, content in files.items():
            path = folder / name
            if name.endswith("/"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755)
        self._own(folder)

    def _find_folder(self) -> str:
        """Return the working folder, or the nearest above it: a command may have removed, replaced or closed it."""
        at = self._home
        for part in PurePosixPath(self._folder).parts[1:]:
            try:
                if not stat.S_ISDIR((at / part).lstat().st_mode) or not os.access(at / part, os.X_OK):
                    break
            except OSError:
                break
            at /= part
        return f"/{at.relative_to(self._home)}" if at != self._home else "/"

    def _get(self, path: str, most: int) -> bytes | None:
        """Read a file. No process of the box runs meanwhile, and links are not followed: they lead out of it."""
        *folders, name = PurePosixPath(path).parts[1:]
        at = os.open(self._home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = below
            # else a pipe would be waited for
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        except OSError:
            return None
        finally:
            os.close(at)
        try:
            return os.read(file, most) if stat.S_ISREG(os.fstat(file).st_mode) else None
        finally:
            os.close(file)


def mount_image(root: Path | None, besides: set[str], *, network: bool) -> list[str]:
    """Return the options that show an image's files, read-only, but for the folders `besides`.

    Raises UserError if the network's files would go into a folder that is a link.
    """
    # one by one: nothing can be shown in a folder that is itself shown read-only
    of_network = [part for name in OF_NETWORK if network for part in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    empty = ["--perms", "0755", "--dir", "/etc"]
    # with processes of this box only
    mounts = ["--proc", "/proc"]
    if root is None:
        # Debian's alternatives (awk, vi) are links into /etc, which would else be closed to the user
        folder = "/etc/alternatives"
        certificates = ["--ro-bind-try", CERTIFICATES, CERTIFICATES] if network else []
        return [*mounts, *mount_system(), *empty, "--ro-bind-try", folder, folder, *of_network, *certificates]
    # it would be followed on this machine, and show files of it
    if network and (root / "etc").is_symlink():
        raise UserError(
            f"the image {root} has a link in the place of /etc, so a box cannot have the network's files there: make "
            "it a folder, or use the box without the network"
        )
    for path in sorted(root.iterdir()):
        if path.name in ("dev", "proc", "sys") or path.name in besides or (network and path.name == "etc"):
            continue
        options = ["--symlink", os.readlink(path)] if path.is_symlink() else ["--ro-bind", str(path)]
        mounts += [*options, f"/{path.name}"]
    return [*mounts, *empty, *mount_etc(root / "etc"), *of_network] if network else mounts


def mount_etc(folder: Path) -> list[str]:
    """Return the options that show the files of an image's /etc, but for those that say where the network is."""
    mounts: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in OF_NETWORK:
            options = ["--symlink", os.readlink(path)] if path.is_symlink() else ["--ro-bind", str(path)]
            mounts += [*options, f"/etc/{path.name}"]
    return mounts


def make_writable(top: Path) -> None:
    """Let the owner of a tree read and change it. Links are left alone."""
    top.chmod(0o755)
    # from the top: a folder is entered once it can be
    for folder, names, files in os.walk(top):
        for path in (os.path.join(folder, name) for name in (*names, *files)):
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | (0o700 if os.path.isdir(path) else 0o600))


def make_folders(root: Path, folder: str) -> None:
    """Make a folder of a box, and those above it. Raises UserError for a link, which would lead out of the box."""
    at = root
    for part in PurePosixPath(folder).parts[1:]:
        at /= part
        try:
            if at.is_symlink():
                raise UserError(f"the working folder {quote(folder)} of a box is below a link of its image")
            at.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"the working folder {quote(folder)} of a box cannot be made: {error.strerror}") from error


def remove_tree(top: Path) -> None:
    """Remove a tree, whatever permissions its folders have."""
    if top.is_symlink() or not top.is_dir():
        top.unlink(missing_ok=True)
        return
    # Each folder is moved up before it is emptied: paths may be too long for the kernel, and too deep for Python.
    pit = Path(tempfile.mkdtemp(prefix="box-removed-", dir=top.parent))
    top.chmod(0o700)
    waiting = [top.rename(pit / "0")]
    made = 1
    while waiting:
        folder = waiting.pop()
        for entry in [*os.scandir(folder)]:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                waiting.append(Path(entry.path).rename(pit / str(made)))
                made += 1
            else:
                os.unlink(entry.path)
        folder.rmdir()
    pit.rmdir()


async def check_bubblewrap() -> None:
    """Run a command in a box of this machine's programs. Raises SandboxUnavailable, with the fix."""
    await Bubblewrap().check()
    box = await BubblewrapBox.open(BoxSpec(image=HOST))
    try:
        ran = await box.run(["sh", "-c", "cat /proc/self/comm > /app/x && cat /app/x"], seconds=Limits().seconds)
    except SandboxUnavailable as error:
        raise SandboxUnavailable(FORBIDDEN.format(said=error)) from error
    finally:
        await box.close()
    if ran.stdout != b"cat\n":
        raise SandboxUnavailable(FORBIDDEN.format(said=last_line(ran.stderr) or f"exit code {ran.exit_code}"))
