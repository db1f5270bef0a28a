"""Data size: what many rows cost a run. python -m tools.benchmarks.data_size [--rows N] [--bytes N ...] [--keep FOLDER]

Makes N rows of each size, as JSONL and as Parquet, and reads them as a lazy source of an RL run in a new process:
seconds until the first prompt, peak memory, beside those of a thousand rows, and draws per second, without and
with conversion. cold: the file is not in the page cache, and no index is kept; index kept: not in the page cache. Then
it reads conversations of 900 tokens as a supervised run does, a step ahead; CPU seconds do not depend on the load of
the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tools.benchmarks.processes import print_row

BATCH = 100_000
DRAWS, CONVERTED = 50_000, 5_000
CONVERSATIONS, TOKENS, PER_STEP = 4_000, 900, 200


class Measurement(NamedTuple):
    """File that was read, and the state of the page cache."""

    rows: int
    size: int
    """Bytes of a row."""
    suffix: str
    cache: str


def make_rows(n: int, size: int, *, reply: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Yield rows of about `size` bytes of JSON, in batches."""
    for first in range(0, n, BATCH):
        batch: list[dict[str, Any]] = []
        for i in range(first, min(first + BATCH, n)):
            text = f"What is {i} + {i * 7919 % 1000}? " + "a" * max(0, size - 110)
            messages = [{"role": "user", "content": "Sum." if reply else text}]
            messages += [{"role": "assistant", "content": text}] if reply else []
            batch.append({"id": f"row/{i}", "messages": messages, "answer": str(i)})
        yield batch


def write_rows(path: Path, batches: Iterator[list[dict[str, Any]]]) -> None:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for batch in batches:
                file.writelines(json.dumps(row) + "\n" for row in batch)
        return
    writer = None
    for batch in batches:
        table = pyarrow.Table.from_pylist(batch)
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=1000)
    assert writer is not None
    writer.close()


def drop_cache(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, model: Path, *, reply: bool) -> dict[str, float]:
    """Return the numbers of a lazy source, read in this process."""
    from configs.data_schema import PromptDataConfig, RowDataConfig, SourceConfig
    from configs.trainer_schema import ModelConfig
    from data_feeds.chat.template_args import make_tokenizer
    from data_feeds.disk_source import DiskSource
    from data_feeds.feed import load_groups, load_prompts

    sources = [SourceConfig.model_validate({"path": str(path), "lazy": True})]
    prompts = PromptDataConfig.model_validate({"train": sources, "max_prompt_tokens": 4096})
    rows = RowDataConfig.model_validate({"train": sources, "max_tokens": 4096})
    tokenizer = make_tokenizer(ModelConfig.model_validate({"path": str(model)}), prompts)
    begin = time.perf_counter()
    if reply:
        feed: Any = load_groups(rows, "train", tokenizer, rows="conversations", seed=0)
    else:
        feed = load_prompts(prompts, "train", tokenizer, seed=0)
    feed.draw(0)
    found = {"first draw, s": time.perf_counter() - begin}
    [source] = feed.sources
    assert isinstance(source, DiskSource)
    if reply:
        begin, cpu = time.perf_counter(), time.process_time()
        for step in range(CONVERSATIONS // PER_STEP):
            for ticket in range(step * PER_STEP, (step + 1) * PER_STEP):
                feed.draw(ticket)
            feed.prepare(range((step + 1) * PER_STEP, (step + 2) * PER_STEP))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return found | {"tokenised rows/s": CONVERSATIONS / seconds, "rows/CPU s": CONVERSATIONS / cpu}
    begin = time.perf_counter()
    for nth in range(DRAWS):
        source.disk.read(source.disk.pick("0", nth))
    found["draws/s"] = DRAWS / (time.perf_counter() - begin)
    begin = time.perf_counter()
    for ticket in range(CONVERTED):
        feed.draw(ticket)
    found["prompts/s"] = CONVERTED / (time.perf_counter() - begin)
    # in KiB on Linux; pages of a mapped file count, too, and the system takes them back when it needs them
    return found | {"peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "anonymous MiB": anonymous()}


def anonymous() -> float:
    """Return the MiB of this process that are no pages of files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


def measure_apart(path: Path, model: Path, *, reply: bool = False) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.benchmarks.data_size", "--measure", str(path), "--model", str(model)]
    done = subprocess.run([*command, *(["--reply"] if reply else [])], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.data_size", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[200, 1700], help="bytes of JSON of a row")
    parser.add_argument("--keep", type=Path, help="folder for the files; by default they are deleted")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reply", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.model, reply=args.reply)))
        return
    from data_prep import tiny_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tiny_model.make(folder / "model")
        os.environ["FEYNRL_CACHE"] = str(folder / "cache")
        found: dict[Measurement, dict[str, float]] = {}
        for size, suffix, rows in product(args.bytes, ("jsonl", "parquet"), (1000, args.rows)):
            path = folder / f"{rows}-{size}.{suffix}"
            if not path.is_file():
                begin = time.perf_counter()
                write_rows(path, make_rows(rows, size))
                print(f"{path.name}: {path.stat().st_size / 2**20:.0f} MiB in {time.perf_counter() - begin:.0f} s")
            # a thousand rows are there for their memory alone, which no cache changes
            for cache in ("cold", "index kept", "warm") if rows == args.rows else ("warm",):
                if cache == "cold":
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                if cache != "warm":
                    drop_cache(path)
                numbers = found[Measurement(rows, size, suffix, cache)] = measure_apart(path, folder / "model")
                show(f"{path.name}, {cache}", numbers)
        path = folder / "conversations.jsonl"
        write_rows(path, make_rows(20_000, TOKENS + 110, reply=True))
        numbers = measure_apart(path, folder / "model", reply=True)
        show(f"{TOKENS} tokens a row", numbers)
    tokenised = f"conversations of {TOKENS} tokens: {numbers['tokenised rows/s']:,.0f} rows a second"
    print_row(f"{describe(found, args.rows)}; {tokenised}")


def describe(found: Mapping[Measurement, dict[str, float]], rows: int) -> str:
    """Return the numbers of the files with so many rows, beside those of a thousand, for the page of results."""
    cells: list[str] = []
    for size, suffix in sorted({(one.size, one.suffix) for one in found}):
        few, cold, warm = (
            found[Measurement(n, size, suffix, c)] for n, c in ((1000, "warm"), (rows, "cold"), (rows, "warm"))
        )
        more = cold["anonymous MiB"] - few["anonymous MiB"]
        cells.append(
            f"{suffix} of {size} bytes {cold['first draw, s']:.1f} s, {more:.0f} MiB, {cold['draws/s']:,.0f} and "
            f"{warm['draws/s']:,.0f}"
        )
    named = "first prompt, memory beyond that of a thousand rows, draws a second from the disk and from the page cache"
    return f"{named}: {'; '.join(cells)}"


def show(name: str, numbers: dict[str, float]) -> None:
    print(f"{name:<28}" + "  ".join(f"{key} {value:,.2f}" for key, value in numbers.items()), flush=True)


if __name__ == "__main__":
    main()
