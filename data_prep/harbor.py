"""Rows of tasks in Harbor's format, for `rollout.env: harbor`.

    python -m data_prep.harbor --tasks my/tasks --image images/debian@sha256:... --out data/tasks.jsonl

Without --image, each task's task.toml must name a docker_image. Tasks that boxes cannot run are excluded, and those
with allow_internet = true unless --network is given.
"""

from __future__ import annotations

import json
from pathlib import Path

from core.errors import UserError, quote
from data_feeds.rows.invalid_rows import InvalidRow, InvalidRows
from data_prep.rows import Row
from data_prep.script import conversion_parser, convert, run_script
from rollouts.boxes.harbor_task import check_network, read_task
from rollouts.boxes.images import DIGEST


def make(folder: Path, image: str = "", *, network: bool = False) -> tuple[list[Row], InvalidRows]:
    """Return a row for each task below a folder. Raises UserError if there is none."""
    found = sorted(path.parent for path in folder.rglob("task.toml"))
    if not found:
        raise UserError(f"--tasks {folder}: there is no task.toml below it")
    rows: list[Row] = []
    invalid = InvalidRows(unit="folder", looked_at=len(found))
    for task in found:
        try:
            rows.append(make_row(task, str(task.relative_to(folder)), image, network=network))
        except UserError as error:
            invalid.add(str(task), InvalidRow("bad_extra", str(error)))
    return rows, invalid


def make_row(task: Path, name: str, image: str, *, network: bool) -> Row:
    """Return a task as a row. Raises UserError if boxes cannot run it, or no image is named."""
    read = read_task(task)
    check_network(read, allowed=network)
    if not image and not read.image:
        raise UserError("task.toml has no docker_image: set --image")
    if not image and not DIGEST.fullmatch(read.image.rpartition("@")[2]):
        raise UserError(f"the docker_image {quote(read.image)} has no digest (NAME@sha256:...): add it, or set --image")
    extra = {"task": str(task.absolute())} | ({"image": image} if image else {})
    return Row(id=name, messages=[{"role": "user", "content": read.instruction}], answer="", extra=json.dumps(extra))


def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("data_prep.harbor", __doc__)
    parser.add_argument("--tasks", type=Path, required=True, help="folder with tasks, at any depth")
    parser.add_argument("--image", default="", help="image of all boxes, with its digest")
    parser.add_argument("--network", action="store_true", help="keep tasks that want the network")
    args = parser.parse_args(argv)
    convert(parser, args, lambda: make(args.tasks, args.image, network=args.network))


if __name__ == "__main__":
    run_script(main)
