"""Images of bubblewrap's boxes: OCI folders by digest, folders with a root, and this machine's own programs.

FOLDER@sha256:...    OCI folder, as `skopeo copy docker://NAME oci:FOLDER` writes it; every file is checked
FOLDER               folder with the files of a root (bin, usr, ...), which has no digest
host                 /usr of this machine, without its Python packages' folders outside
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.cache_folder import find_cache_folder
from core.errors import PARTIAL, UserError, first_line, quote
from core.text.json_text import decode_json
from rollouts.boxes.base import check_variables, is_text

HOST = "host"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of processors in images."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""Prefix of a file that deletes another of the layers below, and name of one that empties its folder."""
OUTSIDE = ("..", WHITEOUT, f"{WHITEOUT}.", f"{WHITEOUT}..")
"""Names that are no file of their folder, and deletions of such."""
LAYERS = ("application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar")
"""Kinds of layers, which may end in +gzip or .gzip."""
NEEDED = ("sh", "prlimit", "env")
"""Programs that start every command."""
ROOT_NEEDED = ("setpriv",)
"""Programs that start it for root too."""
PLACES = ("usr/bin", "bin", "usr/sbin", "sbin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Unpacked image."""

    root: Path | None
    """Folder of its files, which are never changed. None: this machine's."""
    folder: str = "/"
    """Working folder."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def prepare_image(name: str) -> Image:
    """Return an image, unpacked into the cache folder if need be.

    name: a form of this file's docstring. Raises UserError if the digest differs or a file is damaged.
    """
    if name == HOST:
        return Image(root=None)
    path, _, digest = name.partition("@")
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"the image {quote(name)} is no folder: bubblewrap needs an OCI folder, or one with a root")
    if not (folder / "oci-layout").is_file():
        if digest:
            raise UserError(f"the image {quote(name)} has no file oci-layout, so it has no digest: leave out @...")
        return check_programs(Image(root=folder), name)
    if not DIGEST.fullmatch(digest):
        known = ", ".join(
            _take(one, "digest", folder) for one in _take(_read_json(folder / "index.json"), "manifests", folder)
        )
        raise UserError(f"the image {quote(name)} must name its digest: write {path}@DIGEST with one of {known}")
    manifest = _find_manifest(folder, digest)
    described = _take(_take(manifest, "config", folder), "digest", folder)
    config = _read_blob(folder, described).get("config") or {}
    if not isinstance(config, dict):
        raise UserError(f"the image {quote(name)} is damaged: its config is no table")
    root = unpack(folder, digest, manifest)
    listed, work = config.get("Env") or [], config.get("WorkingDir") or "/"
    if not isinstance(listed, list) or not isinstance(work, str) or not is_text(work):
        raise UserError(
            f"the image {quote(name)} is damaged: its Env is no list, or its WorkingDir no text without NUL"
        )
    variables = {key: value for key, _, value in (str(one).partition("=") for one in listed)}
    check_variables(variables, f"the image {quote(name)}")
    image = Image(root=root, folder=work, environment=variables)
    return check_programs(image, name)


def check_programs(image: Image, name: str) -> Image:
    """Return the image. Raises UserError if it lacks a program that starts commands."""
    assert image.root is not None
    for program in (*NEEDED, *(ROOT_NEEDED if os.getuid() == 0 else ())):
        # a link may be absolute, and then leads elsewhere out here
        if not any(os.path.lexists(image.root / place / program) for place in PLACES):
            raise UserError(f"the image {quote(name)} has no {program}: add the packages dash and util-linux")
    return image


def unpack(folder: Path, digest: str, manifest: dict[str, Any]) -> Path:
    """Return the folder with the files of an image, made once per digest."""
    cache = find_cache_folder("images")
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / digest.replace(":", "-")
    with (cache / f"{root.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other engines of this machine want it too
        if root.is_dir():
            return root
        partial = root.with_name(root.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for layer in _take(manifest, "layers", folder):
            _add_layer(folder, layer, partial)
        # so that boxes of any user can enter it
        partial.chmod(0o755)
        partial.rename(root)
    return root


def _find_manifest(folder: Path, digest: str) -> dict[str, Any]:
    """Return the manifest of a digest, which may be that of a list with one per processor."""
    found = _read_blob(folder, digest)
    if "manifests" not in found:
        return found
    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    for one in found["manifests"]:
        if one.get("platform", {}).get("architecture") == machine and one["platform"].get("os") == "linux":
            return _read_blob(folder, _take(one, "digest", folder))
    raise UserError(f"the image {folder}@{digest} has nothing for linux on {machine}: copy it with skopeo --all")


def _find_blob(folder: Path, digest: str) -> Path:
    """Return the file of a digest, once its content has been checked."""
    if not DIGEST.fullmatch(digest):
        raise UserError(f"the image {folder} names the digest {quote(digest)}, where sha256:... is expected")
    path = folder / "blobs" / digest.replace(":", "/")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"the image {folder} has no {digest} ({error.strerror}): copy it again") from error
    if digest != f"sha256:{found}":
        raise UserError(f"the image {folder} is damaged: {path} has the digest sha256:{found}; copy it again")
    return path


def _read_blob(folder: Path, digest: str) -> dict[str, Any]:
    return _read_json(_find_blob(folder, digest))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = decode_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} of an image cannot be read: {first_line(error)}; copy it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} of an image cannot be read: it is no table; copy it again")
    return found


def _take(found: Any, key: str, folder: Path) -> Any:
    """Return a value of a table of an image. Raises UserError if it lacks the key."""
    if not isinstance(found, dict) or key not in found:
        raise UserError(f"the image {folder} is damaged: one of its tables has no {key}; copy it again")
    return found[key]


def _add_layer(folder: Path, layer: dict[str, Any], root: Path) -> None:
    """Unpack a layer over those below it."""
    kind = _take(layer, "mediaType", folder).removesuffix("+gzip").removesuffix(".gzip")
    if kind not in LAYERS:
        raise UserError(
            f"the image {folder} has a layer of the kind {layer['mediaType']}: copy it with skopeo "
            "--dest-compress-format gzip"
        )
    try:
        with tarfile.open(_find_blob(folder, _take(layer, "digest", folder)), "r:*") as tar:
            # newer versions of Python would refuse the absolute links of an image; older ones know no filter
            tar.extraction_filter = lambda member, path: member
            for member in tar:
                _add_member(tar, member, root)
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"the image {folder} cannot be unpacked: {first_line(error)}") from error


def _add_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    path = root / member.name
    # "./", with which `tar -C FOLDER .` begins
    if path == root:
        return
    # a member below a link to elsewhere, or one named ../x or .wh..., would be written or deleted outside
    if not path.parent.resolve().is_relative_to(root.resolve()) or path.name in OUTSIDE:
        raise UserError(f"an image has the file {quote(member.name)}, which is outside of its root")
    if path.name == OPAQUE:
        for below in path.parent.iterdir():
            _remove(below)
    elif path.name.startswith(WHITEOUT):
        _remove(path.with_name(path.name.removeprefix(WHITEOUT)))
    elif member.islnk() and not (root / member.linkname).resolve().is_relative_to(root.resolve()):
        raise UserError(f"an image has the link {quote(member.name)} to a file outside of its root")
    elif not (member.isdev() or member.isfifo()):
        if not (member.isdir() and path.is_dir() and not path.is_symlink()):
            _remove(path)
        # files of an image belong to whoever unpacks it; setuid programs have no effect in a box
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        # its owner here must be able to fill a folder
        member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0)
        tar.extract(member, root)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
