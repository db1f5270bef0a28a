"""Ten small tasks in Harbor's format, and an image for their boxes, made of programs of this machine.

    python -m data_prep.boxed_tasks --out data/boxed

writes tasks/, image/ (an OCI folder) and train.jsonl for `rollout.env: harbor`. The tasks need a shell and the usual
small programs. Harbor itself can run them too: each has a Dockerfile.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from data_prep import harbor
from data_prep.oci_image import LINKS, collect_programs, write_image, write_layer
from data_prep.rows import Row, write_rows
from data_prep.script import run_script

PROGRAMS = (
    *("bash", "sh", "setpriv", "prlimit", "awk", "grep", "sed", "find", "xargs", "tar", "gzip", "diff", "cmp"),
    *("basename", "cat", "chmod", "comm", "cp", "cut", "date", "dd", "dirname", "echo", "env", "expr", "false"),
    *(
        "head",
        "id",
        "join",
        "ln",
        "ls",
        "mkdir",
        "mkfifo",
        "mktemp",
        "mv",
        "nl",
        "od",
        "paste",
        "printf",
        "pwd",
        "readlink",
    ),
    *("realpath", "rm", "rmdir", "seq", "sha256sum", "sleep", "sort", "stat", "tac", "tail", "tee", "test", "touch"),
    *("tr", "true", "uniq", "wc"),
)
ETC = {"etc/passwd": b"root:x:0:0:root:/root:/bin/bash\n", "etc/group": b"root:x:0:\n"}
SETTINGS = """schema_version = "1.1"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 512
storage_mb = 64
allow_internet = false
"""
DOCKERFILE = "FROM debian:13-slim\nWORKDIR /app\nCOPY app /app\n"
TEST = "#!/bin/bash\ncd /app || exit 1\nif {}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
"""Tests of a task with one condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedTask:
    """Task with the files in /app at its start."""

    instruction: str
    solution: str
    """Commands of a reference solution."""
    condition: str = ""
    """Command that succeeds if the task is solved."""
    test: str = ""
    """Script in place of a condition."""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])


def make_parcel() -> bytes:
    """Return a gzipped tar archive with one letter in it."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        letter = b"The key is under the third flower pot.\n"
        entry = tarfile.TarInfo("parcel/inner/letter.txt")
        entry.size = len(letter)
        tar.addfile(entry, io.BytesIO(letter))
    return gzip.compress(written.getvalue(), mtime=0)


TREES = b"oak\nash\nelm\noak\nyew\nash\nfir\n"
ORDERS = b"id,item,amount\n1,nail,40\n2,board,125\n3,nail,7\n4,glue,31\n"
VISITS = b"".join(
    b"%s - GET /%s %d\n" % (address, page, code)
    for address, page, code in [
        (b"10.0.0.4", b"a", 200),
        (b"10.0.0.9", b"b", 404),
        (b"10.0.0.9", b"c", 404),
        (b"10.0.0.4", b"d", 404),
        (b"10.0.0.4", b"e", 200),
        (b"10.0.0.9", b"f", 404),
    ]
)
MENDED = b'#!/bin/bash\nif [ -n "$1" ]; then\n  echo "hello $1"\nfi\n'
SERVER = b"# the server\nhost=localhost\nport=80\nworkers=4\n"
MEASURE_SERVER = """#!/bin/bash
cd /app || exit 1
port=0; kept=0
[ "$(grep -c '^port=8080$' server.conf)" = 1 ] && [ "$(grep -c '^port=' server.conf)" = 1 ] && port=1
[ "$(grep -v '^port=' server.conf)" = "$(printf '# the server\\nhost=localhost\\nworkers=4')" ] && kept=1
echo "{\\"reward\\": $((port * kept)), \\"port\\": $port, \\"kept\\": $kept}" > /logs/verifier/reward.json
"""
TASKS = {
    "count-lines": BoxedTask(
        instruction="How many lines has /app/trees.txt? Write the number to /app/count.txt.",
        files={"trees.txt": TREES},
        solution="wc -l < trees.txt > count.txt",
        condition='[ "$(tr -d " \\n" < count.txt)" = 7 ]',
    ),
    "sort-names": BoxedTask(
        instruction="Write the different lines of /app/trees.txt to /app/sorted.txt, each once, in alphabetical order.",
        files={"trees.txt": TREES},
        solution="sort -u trees.txt > sorted.txt",
        condition='[ "$(cat sorted.txt)" = "$(printf \'ash\\nelm\\nfir\\noak\\nyew\')" ]',
    ),
    "sum-column": BoxedTask(
        instruction="Add the numbers in the column amount of /app/orders.csv. Write the sum to /app/sum.txt.",
        files={"orders.csv": ORDERS},
        solution="awk -F, 'NR > 1 { sum += $3 } END { print sum }' orders.csv > sum.txt",
        condition='[ "$(tr -d " \\n" < sum.txt)" = 203 ]',
    ),
    "mend-script": BoxedTask(
        instruction="A text in /app/greet.sh lacks the quotation mark at its end. Add it, and change nothing else.",
        files={"greet.sh": MENDED.replace(b'$1"\n', b"$1\n")},
        solution="sed -i '/hello/s/$/\"/' greet.sh",
        # its content is compared: a script that the tests run could write the reward
        condition=f'[ "$(sha256sum < greet.sh)" = "{hashlib.sha256(MENDED).hexdigest()}  -" ]',
    ),
    "find-largest": BoxedTask(
        instruction="Find the largest file below /app/stones, and write its absolute path to /app/largest.txt.",
        files={f"stones/{name}": b"x" * size for name, size in (("a/one", 10), ("a/b/two", 90), ("three", 40))},
        solution="echo /app/stones/a/b/two > largest.txt",
        condition='[ "$(cat largest.txt)" = /app/stones/a/b/two ]',
    ),
    "rename-notes": BoxedTask(
        instruction="Rename every file below /app/notes that ends in .txt, so that it ends in .md. Keep other files.",
        files={"notes/a.txt": b"a\n", "notes/b c.txt": b"b\n", "notes/deep/d.txt": b"d\n", "notes/e.csv": b"e\n"},
        solution='find notes -name \'*.txt\' | while read -r f; do mv "$f" "${f%.txt}.md"; done',
        condition="[ \"$(find notes -type f | sort | tr '\\n' ,)\" = "
        "'notes/a.md,notes/b c.md,notes/deep/d.md,notes/e.csv,' ] && grep -q b 'notes/b c.md'",
    ),
    "open-parcel": BoxedTask(
        instruction="/app/parcel.tar.gz holds a letter. Write its SHA-256, in hexadecimal, to /app/hash.txt.",
        files={"parcel.tar.gz": make_parcel()},
        solution="tar -xzf parcel.tar.gz && sha256sum parcel/inner/letter.txt | cut -d ' ' -f 1 > hash.txt",
        condition="[ \"$(tr -d ' \\n' < hash.txt)\" = "
        '"$(tar -xzOf parcel.tar.gz | sha256sum | cut -d " " -f 1)" ] && [ -s hash.txt ]',
    ),
    "read-log": BoxedTask(
        instruction="Which address has the most lines with code 404 in /app/visits.log? Write it to /app/address.txt.",
        files={"visits.log": VISITS},
        solution="grep ' 404$' visits.log | cut -d ' ' -f 1 | sort | uniq -c | sort -rn | awk 'NR == 1 { print $2 }'"
        " > address.txt",
        condition='[ "$(cat address.txt)" = 10.0.0.9 ]',
    ),
    "set-rights": BoxedTask(
        instruction="Let only the owner of /app/secret.sh read, write and execute it, and nobody do more.",
        files={"secret.sh": b"#!/bin/sh\necho open\n"},
        solution="chmod 700 secret.sh",
        condition='[ "$(stat -c %a secret.sh)" = 700 ]',
    ),
    "set-port": BoxedTask(
        instruction="Set the port in /app/server.conf to 8080, and leave all other lines as they are.",
        files={"server.conf": SERVER},
        solution="sed -i 's/^port=.*/port=8080/' server.conf",
        test=MEASURE_SERVER,
    ),
}
"""Tasks by name. No file of one has the name of another's, unless they are equal: all share an image."""


def make(folder: Path) -> list[Row]:
    """Write tasks and image into a folder, and return the rows."""
    for name, task in TASKS.items():
        write_harbor_task(folder / "tasks" / name, task)
    base = write_layer(collect_programs(PROGRAMS) | ETC, LINKS)
    given = {f"app/{name}": content for task in TASKS.values() for name, content in task.files.items()}
    digest = write_image(folder / "image", [base, write_layer(given)], work_folder="/app")
    rows, _ = harbor.make(folder / "tasks", f"{(folder / 'image').absolute()}@{digest}")
    return rows


def write_harbor_task(folder: Path, task: BoxedTask) -> None:
    """Write a task in Harbor's format."""
    files = {
        "instruction.md": task.instruction + "\n",
        "task.toml": SETTINGS,
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": task.test or TEST.format(task.condition),
        "solution/solve.sh": f"#!/bin/bash\ncd /app || exit 1\n{task.solution}\n",
    }
    contents = {name: text.encode() for name, text in files.items()}
    contents |= {f"environment/app/{name}": content for name, content in task.files.items()}
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.boxed_tasks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the tasks, the image and the rows")
    args = parser.parse_args(argv)
    write_rows(args.out / "train.jsonl", make(args.out))


if __name__ == "__main__":
    run_script(main)
