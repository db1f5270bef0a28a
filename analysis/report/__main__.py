"""Make a single HTML file from run folders: python -m analysis.report RUN [RUN ...] [--out FILE] [--all]

The file opens in a browser without a server and without a network. It holds every metric, and of each step a selection
of its samples. With --all the other samples are written into a folder beside it, which the page reads when asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.cli import Parser, run_guarded
from core.text.plain_text import print_line

SAMPLES = 32
"""Default of --samples: samples of a step in the page."""


def main() -> int:
    parser = Parser("feynrl report", description="Make one HTML file of one or more run folders.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder, such as runs/NAME-TIME")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; unset: report.html, in the folder of the only run or here"
    )
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help=f"samples of a step in the page (default {SAMPLES})"
    )
    parser.add_argument(
        "--all", action="store_true", help="write every sample into files beside the page, which it loads when asked"
    )
    args = parser.parse_args()
    from analysis.report.page import write_page

    out: Path = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    for sentence in write_page(args.runs, out, samples=args.samples, everything=args.all):
        print_line(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
