"""Writer of small OCI images from files of this machine, without a daemon. An image is named by its digest."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import UserError
from rollouts.boxes.images import ARCHITECTURES

LINKS = {"bin": "usr/bin", "sbin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}
"""Links of the root, as Debian has them."""
LIBRARY = re.compile(r"(/\S+) \(0x")
"""Path of a library in the output of ldd."""


def collect_programs(names: Iterable[str]) -> dict[str, bytes]:
    """Return programs of this machine with the libraries that they load, by their path in an image."""
    found = {name: shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        raise UserError(f"this machine has no {', '.join(missing)}, which the image needs: install it")
    programs = {name: os.path.realpath(path or "") for name, path in found.items()}
    if shutil.which("ldd") is None:
        raise UserError("this machine has no ldd, which lists the libraries of an image's programs: install it")
    # unchecked: its exit code is 1 for a static program or a script, which has no libraries
    listed = subprocess.run(["ldd", *programs.values()], capture_output=True, text=True).stdout
    if missing := [line.split()[0] for line in listed.splitlines() if line.endswith("=> not found")]:
        raise UserError(f"this machine has no {', '.join(missing)}, which the image needs: install it")
    files = {f"usr/bin/{name}": Path(path).read_bytes() for name, path in programs.items()}
    for library in sorted({*LIBRARY.findall(listed)}):
        place = library.lstrip("/")
        files[place if place.startswith("usr/") else f"usr/{place}"] = Path(library).read_bytes()
    return files


def write_layer(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """Return a layer with files, all executable, and links: path -> target. Equal files give equal bytes."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
        for name in sorted(folders):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        for name, target in sorted((links or {}).items()):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return written.getvalue()


def write_image(folder: Path, layers: Sequence[bytes], *, work_folder: str) -> str:
    """Write an OCI folder with one image, and return the digest of its manifest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def add(content: bytes, kind: str) -> dict[str, Any]:
        name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{name}", "size": len(content)}

    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    written = [add(layer, "application/vnd.oci.image.layer.v1.tar") for layer in layers]
    config = {
        "architecture": machine,
        "os": "linux",
        "config": {"WorkingDir": work_folder},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in written]},
        # builders refuse a base whose history lists other layers
        "history": [{"created_by": "feynrl"} for _ in written],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add(_write_json(config), "application/vnd.oci.image.config.v1+json"),
        "layers": written,
    }
    named = add(_write_json(manifest), manifest["mediaType"])
    index = {"schemaVersion": 2, "manifests": [named | {"platform": {"architecture": machine, "os": "linux"}}]}
    (folder / "index.json").write_bytes(_write_json(index))
    (folder / "oci-layout").write_bytes(_write_json({"imageLayoutVersion": "1.0.0"}))
    return named["digest"]


def _write_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
