"""Command lines of podman, docker and apptainer, as their manuals describe them. Tests run podman 4.3.

Docker 20.10 ran once, by hand. Apptainer has not run.

Containers of podman and docker are named and labelled, and stop by themselves after LONGEST_LIFE_S. What a killed run
leaves is removed by `podman rm`, `docker rm` or `apptainer instance stop`, but for its folders box-* in the folder for
temporary files. Files travel as tar archives.
The disk is limited where the engine's storage can do that (btrfs, zfs, or xfs with quotas), and that of Apptainer by
`sessiondir max size` of its configuration; the number of files is not. Commands of podman and docker run as the image's
user, often root, who can replace any program of the container, those that verify its work included. No process of a
policy is left beside the verifier. Values of variables are in no command line, which all users of the machine see, but
for variables that the program itself would obey (OF_PROGRAM).

Sources: docs.podman.io (podman-run, -exec, -cp, -kill, -rm), docs.docker.com/reference/cli (docker run, exec, cp, kill,
rm), apptainer.org/docs/user/1.3 (instance, exec, networking).
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollouts.boxes.base import PATH, BoxSpec
from rollouts.boxes.images import DIGEST

LABEL = "feynrl"
OF_PROGRAM = re.compile(
    r"PATH|HOME|USER|TMPDIR|\w+_PROXY|(LD|XDG|DOCKER|PODMAN|CONTAINERS?|BUILDAH|STORAGE|SSL|REGISTRY)(_\w+)?|GO\w+",
    re.IGNORECASE,
)
"""Variables that podman and docker would obey themselves, so their values must be in the command line."""
MOST_PROCESSES = 2**15
"""Podman's own number of processes, which a container of it cannot exceed."""
LONGEST_LIFE_S = 24 * 3600
Words = list[str]


class Program(Protocol):
    """Builder of the command lines of one program."""

    @property
    def name(self) -> str: ...

    def start(self, box: str, spec: BoxSpec, *, limit_disk: bool) -> Words:
        """Start a container called `box` that waits, and return. limit_disk: where the program can."""
        ...

    def pass_on(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that the program must have, so that a container gets these."""
        ...

    def run(self, box: str, command: Sequence[str], *, folder: str, environment: Mapping[str, str]) -> Words:
        """Run a command in the container. folder: "" for the image's."""
        ...

    def remove(self, box: str, folder: str) -> Words:
        """Remove a folder, whoever owns it."""
        ...

    def put(self, box: str) -> Words:
        """Unpack the tar archive on standard input into the root."""
        ...

    def get(self, box: str, path: str) -> Words:
        """Write a tar archive with one file to standard output."""
        ...

    def look(self, box: str) -> Words:
        """Fail, or print `false`, unless the container is running."""
        ...

    def restart(self, box: str) -> Words:
        """End the processes of commands. The files stay."""
        ...

    def end(self, box: str) -> list[Words]:
        """Kill all processes, then remove the container."""
        ...

    def names_digest(self, image: str) -> bool:
        """Tell whether a name of an image means the same image for ever."""
        ...


@dataclass(frozen=True, slots=True)
class Containers:
    """Podman or docker, whose options are the same."""

    name: str

    def start(self, box: str, spec: BoxSpec, *, limit_disk: bool) -> Words:
        limits = spec.limits
        memory = f"{limits.memory_mib}m"
        words = [self.name, "run", "--detach", "--init", "--name", box, "--label", f"{LABEL}={box}"]
        words += ["--network", "bridge" if spec.network else "none", "--security-opt", "no-new-privileges"]
        # swap counts in the second, so equal values allow none
        words += ["--memory", memory, "--memory-swap", memory, "--cpus", str(spec.cpus)]
        words += ["--pids-limit", str(limits.processes), "--ulimit", f"fsize={limits.file_mib * 2**20}"]
        words += ["--ulimit", f"nofile={limits.open_files}", *limit_user()]
        words += ["--storage-opt", f"size={limits.disk_mib}m"] if limit_disk else []
        words += name_variables(spec.environment)
        if spec.folder:
            words += ["--workdir", spec.folder]
        return [*words, "--entrypoint", "sleep", spec.image, str(LONGEST_LIFE_S)]

    def pass_on(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if not OF_PROGRAM.fullmatch(name)}

    def run(self, box: str, command: Sequence[str], *, folder: str, environment: Mapping[str, str]) -> Words:
        words = [self.name, "exec", *name_variables(environment)]
        words += ["--workdir", folder] if folder else []
        return [*words, box, *command]

    def remove(self, box: str, folder: str) -> Words:
        # the image's user may have no right to, and programs of its folders must not run as root
        words = [self.name, "exec", "--user", "0", "--env", f"PATH={PATH}", "--workdir", "/", box]
        return [*words, "rm", "-rf", folder]

    def put(self, box: str) -> Words:
        return [self.name, "cp", "-", f"{box}:/"]

    def get(self, box: str, path: str) -> Words:
        return [self.name, "cp", f"{box}:{path}", "-"]

    def look(self, box: str) -> Words:
        # not a program of the container, which a policy can replace
        return [self.name, "container", "inspect", "--format", "{{.State.Running}}", box]

    def restart(self, box: str) -> Words:
        return [self.name, "restart", "-t", "0", box]

    def end(self, box: str) -> list[Words]:
        return [[self.name, "kill", box], [self.name, "rm", "--force", "--volumes", box]]

    def names_digest(self, image: str) -> bool:
        # also the id of an image that was built here
        return bool(DIGEST.fullmatch(image.rpartition("@")[2]))


@dataclass(frozen=True, slots=True)
class Apptainer:
    """Apptainer, for clusters without a daemon. Its limits need cgroups v2, and its network none needs setuid mode."""

    name: str = "apptainer"

    def start(self, box: str, spec: BoxSpec, *, limit_disk: bool) -> Words:
        limits = spec.limits
        words = [self.name, "instance", "start", "--containall", "--no-home", "--writable-tmpfs", "--no-privs"]
        words += [] if spec.network else ["--net", "--network", "none"]
        words += ["--memory", f"{limits.memory_mib}M", "--memory-swap", "0", "--cpus", str(spec.cpus)]
        words += ["--pids-limit", str(limits.processes)]
        words += ["--pwd", spec.folder] if spec.folder else []
        # the working folder is the box's
        return [*words, os.path.abspath(spec.image) if os.path.isfile(spec.image) else spec.image, box]

    def pass_on(self, environment: Mapping[str, str]) -> dict[str, str]:
        # these pass --cleanenv too
        return {f"APPTAINERENV_{name}": value for name, value in environment.items()}

    def run(self, box: str, command: Sequence[str], *, folder: str, environment: Mapping[str, str]) -> Words:
        words = [self.name, "exec", "--cleanenv"]
        words += ["--pwd", folder] if folder else []
        return [*words, f"instance://{box}", *command]

    def remove(self, box: str, folder: str) -> Words:
        return self.run(box, ["rm", "-rf", folder], folder="/", environment={})

    def put(self, box: str) -> Words:
        return [self.name, "exec", "--cleanenv", f"instance://{box}", "tar", "-xf", "-", "-C", "/"]

    def get(self, box: str, path: str) -> Words:
        return [self.name, "exec", "--cleanenv", f"instance://{box}", "tar", "-cf", "-", "-C", "/", path.lstrip("/")]

    def look(self, box: str) -> Words:
        return [self.name, "exec", "--cleanenv", f"instance://{box}", "true"]

    def restart(self, box: str) -> Words:
        # A new start would lose its files, which are in memory. All processes but the instance's first are killed.
        return [self.name, "exec", "--cleanenv", f"instance://{box}", "sh", "-c", "kill -KILL -1 || :"]

    def end(self, box: str) -> list[Words]:
        return [[self.name, "instance", "stop", "--signal", "KILL", box]]

    def names_digest(self, image: str) -> bool:
        # a .sif file is one image
        return image.endswith(".sif") or bool(DIGEST.fullmatch(image.rpartition("@")[2]))


def name_variables(environment: Mapping[str, str]) -> Words:
    """Return the options for variables whose values the program takes from its own variables.

    >>> name_variables({"API_KEY": "secret", "PATH": "/bin"})
    ['--env', 'API_KEY', '--env', 'PATH=/bin']
    """
    named = [f"{name}={value}" if OF_PROGRAM.fullmatch(name) else name for name, value in environment.items()]
    return [part for one in named for part in ("--env", one)]


def limit_user() -> Words:
    """Return the option for the number of processes of the container's user, on the whole machine.

    Without it podman asks for more than it has, which root without CAP_SYS_RESOURCE cannot get. The processes of a
    container are limited by --pids-limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, MOST_PROCESSES)
    return ["--ulimit", f"nproc={most}"]


PROGRAMS: dict[str, Program] = {one.name: one for one in (Containers("podman"), Containers("docker"), Apptainer())}
