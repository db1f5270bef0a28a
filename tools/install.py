"""Make .venv and install what is asked for; done in a moment when it is up to date.

    python3 tools/install.py run         what a run may import: make quickstart
    python3 tools/install.py standard    and the trackers, and what vLLM's server wants: make install
    python3 tools/install.py test        and what tests, lint and types need: make test
    python3 tools/install.py --newest    all of it in its newest versions, in a new .venv-newest
    python3 tools/install.py --without-vllm    the set run in its newest versions, which vLLM may not allow, in a new
                                               .venv-without-vllm

For the CPU the lines of constraints.txt are installed as they stand: they are complete (tools/lock.py), so pip resolves
nothing. For a GPU pip resolves within constraints-gpu.txt, and for the newest versions freely. An install that was
stopped goes on where it was. When the build (CPU or GPU) changes, .venv is made anew; FEYNRL_BUILD=cpu or gpu overrides
what this machine has. Standard library only: this runs before anything is installed.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"run": [], "standard": ["trackers"]}
EXTRAS["test"] = ["trackers", "tensorboard", "lm-eval", "gymnasium", "quantization", "test", "dev"]
INPUTS = ("pyproject.toml", "setup.py", "constraints.txt", "constraints-gpu.txt", "tools/install.py", "tools/builds.py")
SETS = list(EXTRAS)  # each holds those before it
PIP = ["-m", "pip", "install", "--disable-pip-version-check"]
TORCH_CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
IMPORTS = ("vllm.v1.engine.llm_engine", "ray, datasets, deepspeed, peft, transformers.models.llama.modeling_llama")
RESUME = "What was installed stays, and the same command goes on from there. (Does pip reach a package index?)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", choices=SETS, default="standard", help="which set")
    parser.add_argument("--newest", action="store_true", help="ignore constraints.txt, install into a new .venv-newest")
    parser.add_argument("--without-vllm", action="store_true", help="the same without vLLM: .venv-without-vllm")
    args = parser.parse_args()
    newest = args.newest or args.without_vllm
    wanted, venv = ("test", ROOT / ".venv-newest") if newest else (args.wanted, ROOT / ".venv")
    if args.without_vllm:
        wanted, venv = "run", ROOT / ".venv-without-vllm"
    sys.path.insert(0, str(ROOT))  # the folder of this script is there, and not the clone
    from tools.builds import choose_build, find_builds

    build, why = choose_build(pinned("run", "constraints-gpu.txt")["cuda-toolkit"])
    stamp, inputs, started = venv / "installed", hash_inputs(), time.monotonic()
    # the stamp is written last, so an install that was stopped is never taken for a whole one
    stamped = stamp.read_text().split() if stamp.is_file() else []  # build, set, hash; the build alone: unfinished
    python = str(venv / "bin" / "python")
    usable = stamped[:1] == [build] and find_builds(venv) <= {build} and os.access(python, os.X_OK) and not newest
    # a Python that was upgraded or moved leaves a .venv that cannot run any more
    usable = usable and subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0
    if usable and stamped[1:] in [[name, inputs] for name in SETS[SETS.index(wanted) :]]:
        return say(f"{venv.name} is up to date ({build} build: {why})")
    other = f", in place of the {stamped[0].upper()} build," if stamped and stamped[0] != build else ""
    say(f"installing the {build.upper()} build into {venv.name}{other} because {why}; set: {wanted}")
    if not usable:  # the builds share names of packages and modules, so one is never installed over the other
        fix = "If this Python has no venv: on Debian and Ubuntu the fix is apt-get install python{}.{}-venv"
        run([sys.executable, "-m", "venv", "--clear", str(venv)], fix=fix.format(*sys.version_info))
    # the build alone: unfinished, and safe to go on from
    stamp.write_text(build)
    for folder in venv.glob("lib/python*/site-packages/*.dist-info"):
        if not (folder / "RECORD").is_file():  # pip writes it last, and takes a package without it for installed
            shutil.rmtree(folder)
    if build == "cpu" and not newest:
        install_lines(python, wanted)
    else:
        install_resolved(python, build, wanted, newest=newest, vllm=not args.without_vllm)
    if (found := " and ".join(sorted(find_builds(venv)))) != build:
        sys.exit(
            f"pip has installed torch or vLLM for {found or 'nothing'}: does `pip config list` name an index of it?"
        )
    say("importing once what a run imports: this shows that it loads, and compiles it")
    # the import is to leave compiled files behind, which make the first run start quickly
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    run(*([python, "-c", f"import {names}"] for names in IMPORTS[args.without_vllm :]))
    stamp.write_text(f"{build} {wanted} {inputs}")
    say(f"{venv.name} is ready, after {time.monotonic() - started:.0f} s")


def hash_inputs() -> str:
    """Return a hash of the files that decide what is installed, and of where they are."""
    # the place too: the link to the clone and the scripts of .venv hold absolute paths
    return hashlib.sha256(b"".join([os.fsencode(ROOT), *((ROOT / name).read_bytes() for name in INPUTS)])).hexdigest()


def install_lines(python: str, wanted: str) -> None:
    """Install the tested versions without their dependencies; pip passes over those that are there."""
    pins = pinned(wanted)
    # torch first and apart: its CPU build may come from another index
    install_cpu_torch(python, pins.pop("torch"))
    lines = [f"{name}=={version}" for name, version in pins.items()]
    say(f"{len(lines)} packages, less those that are there: about a minute, if the network is fast")
    # two pips side by side, because each unpacks on one core
    run(*([python, *PIP, "-qq", "--no-deps", "--no-compile", *lines[half::2]] for half in range(2)))
    run([python, *PIP, "-qq", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])


def install_cpu_torch(python: str, version: str) -> list[str]:
    """Install torch for the CPU from where pip is configured to look, else from PyTorch's index; return its options."""
    # +cpu is asked for by name: the index may also have the GPU build, which is gigabytes larger
    command = [python, *PIP, "-qq", "--no-deps", "--no-compile", f"torch=={version}+cpu"]
    if run(command, may_fail=True):
        return []
    say(f"pip finds no torch=={version}+cpu where it is configured to look; asking PyTorch's own CPU index")
    run([*command, *TORCH_CPU_INDEX])
    return TORCH_CPU_INDEX


def install_resolved(python: str, build: str, wanted: str, *, newest: bool, vllm: bool) -> None:
    """Install versions that pip resolves, for a GPU or the newest. vllm: also vLLM."""
    options = install_cpu_torch(python, pinned(wanted)["torch"]) if build == "cpu" else []
    # without --upgrade pip keeps any version that is good enough
    newer = ["--upgrade", *PYPROJECT["build-system"]["requires"]]
    options += newer if newest else ["--constraint", str(ROOT / "constraints-gpu.txt")]
    # pip refuses empty brackets
    extras = f"[{','.join(found)}]" if (found := [build] * vllm + EXTRAS[wanted]) else ""
    run([python, *PIP, *options, "--editable", f"{ROOT}{extras}"])
    if wanted == "test":
        run([python, *PIP, "--no-deps", *PYPROJECT["tool"]["feynrl"]["alone"]])
    # pip has installed what packages ask for and no CPU run needs; CUDA's torchvision even breaks vLLM's imports
    if build == "cpu":
        run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *PYPROJECT["tool"]["feynrl"]["never"]])


def pinned(wanted: str, file: str = "constraints.txt") -> dict[str, str]:
    """Return {name: version} of a set and those before it."""
    _, *sections = re.split(r"^# \[\w+\]", (ROOT / file).read_text(), flags=re.MULTILINE)
    return dict(re.findall(r"^([\w.-]+)===?(\S+)$", "".join(sections[: SETS.index(wanted) + 1]), re.MULTILINE))


def run(*commands: list[str], fix: str = RESUME, may_fail: bool = False) -> bool:
    """Run commands side by side, and tell whether all went well. One that fails ends this program, unless it may."""
    # all are started before the first is waited for
    running = [subprocess.Popen(c, cwd=ROOT, stderr=subprocess.DEVNULL if may_fail else None) for c in commands]
    for command, process in zip(commands, running, strict=True):
        if process.wait() and not may_fail:
            sys.exit(f"this failed with exit code {process.returncode}: {shlex.join(command[:12])}\n{fix}")
    return not any(process.returncode for process in running)


def say(text: str) -> None:
    print(f"[install] {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"stopped. {RESUME}")
