"""A recording of the run page while a run grows, as an animated GIF: python -m tools.record_run_page --write

    python -m tools.record_run_page [--run RUN] [--out FILE]

Without --run it first trains the quickstart's warmed-up model for STEPS steps, in this process. The page is then made
from the first steps of the run, again and again, and at last from all of it, and every page is opened in Chromium
(`make browser`). --write is --out docs/run_page.gif.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from analysis.capture.tokens import captured_steps
from analysis.report.page import write_page
from analysis.report.run_files import read_metrics
from core import metrics as names
from tools.browser import MISSING, Browser, find_browser
from tools.layers import ROOT

PAGE = ROOT / "docs" / "run_page.gif"
STEPS = 24
WIDTH, HEIGHT, SCALE = 1200, 750, 0.8
"""Size of the window in the page's pixels, and the image's pixels for each."""
COLOURS = 32
GROWS_MS, READS_MS = 350, 2500
"""How long a frame of a growing page is shown, and one that is to be read."""
SAMPLES = 16
Frame = tuple[Image.Image, int]
"""Picture, and the milliseconds for which it is shown."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.record_run_page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, help="folder of a run that has ended; made if it is not given")
    parser.add_argument("--out", type=Path, help="the GIF")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    program = find_browser()
    if program is None or (args.out is None) != args.write:
        parser.error(MISSING if program is None else "give --out FILE or --write")
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        run = args.run.absolute() if args.run else make_run(scratch / "made")
        with Browser(program, scratch / "profile", width=WIDTH, height=HEIGHT) as browser:
            shape = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **shape)
            frames = list(record(browser, run, scratch))
        size = write_gif(frames, PAGE if args.write else args.out)
    print(f"{len(frames)} frames, {size / 1000:.0f} kB")
    return 0


def make_run(home: Path) -> Path:
    """Train the quickstart's model, warmed up, in this process; return the run folder."""
    import main_rl
    from tools.benchmarks.learn_work import TINY, prepare

    prepare("tiny")
    changes = {
        "name": "quickstart",
        "run_dir": home,
        "backend": "local",
        "rollout.engine": "hf",
        "steps": STEPS,
        # from the root, for the page shows them
        "model.path": f"{TINY}/sft",
        "data.train": f"{TINY}/train.jsonl",
        "data.eval": f"{TINY}/eval.jsonl",
        "capture.every": STEPS - 1,
        "display": "quiet",
    }
    with contextlib.chdir(ROOT):
        main_rl.run(str(ROOT / "configs/quickstart.yaml"), [f"{key}={value}" for key, value in changes.items()])
    [run] = home.iterdir()
    return run


def record(browser: Browser, run: Path, scratch: Path) -> Iterator[Frame]:
    """Yield the frames: the curves as they grow, then a step's samples, a sample's tokens, and the time of the run."""
    steps = [int(line[names.STEP_NUMBER]) for line in read_metrics(run / "metrics.jsonl")[0]]
    page = scratch / "page.html"
    for end in steps[1:-1:2]:
        write_page([cut_run(run, end, scratch / "grown")], page, samples=0, everything=False)
        yield photograph(browser, page, "#curves"), GROWS_MS
    write_page([run], page, samples=SAMPLES, everything=False)
    yield photograph(browser, page, "#curves"), READS_MS
    tour = [f"#samples/r0/{steps[len(steps) // 3]}", "#time"]
    if captured := captured_steps(run):
        tour.insert(1, f"#microscope/r0/{captured[0]}")
    for place in tour:
        yield photograph(browser, page, place, top="tabs"), READS_MS


def cut_run(run: Path, end: int, home: Path) -> Path:
    """Return a copy of a run folder as it was after the step `end`, without samples: the page says that it runs."""
    folder = home / run.name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "samples").mkdir(parents=True)
    shutil.copy(run / "config.yaml", folder)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)[names.STEP_NUMBER] <= end]
    (folder / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")
    return folder


def photograph(browser: Browser, page: Path, place: str, *, top: str = "header") -> Image.Image:
    """Return a picture of the window, when a tab of the page is complete. top: id of the element at the upper edge."""
    browser.open(page, place)
    browser.wait_for("document.querySelector('.tab[data-done]')")
    browser.ask(f"document.getElementById('{top}').scrollIntoView()")
    # a plot is drawn when it is seen, in one of the next frames
    browser.ask("new Promise((done) => setTimeout(done, 150))")
    shot = browser.call("Page.captureScreenshot", format="png")
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


def write_gif(frames: list[Frame], out: Path) -> int:
    """Write frames with one palette for all, so that pixels that stay are equal; return the bytes."""
    pictures = [picture for picture, _ in frames]
    width, height = pictures[0].size
    # the palette is of the first and the last pictures: the others are in between
    seen = [pictures[0], *pictures[-4:]]
    together = Image.new("RGB", (width, height * len(seen)))
    for n, picture in enumerate(seen):
        together.paste(picture, (0, n * height))
    palette = together.quantize(COLOURS, dither=Image.Dither.NONE)
    drawn = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    spans = [span for _, span in frames]
    drawn[0].save(out, save_all=True, append_images=drawn[1:], duration=spans, loop=0, optimize=True)
    return out.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
