"""Report on the data of a recipe: python -m tools.data_report RECIPE [key=value ...] [--run RUN] [--out FILE]

One HTML page, for each source of data.train: lengths in tokens, exact and near duplicates, rows that share words with
data.eval, invalid rows, columns that the model does not see, and answers that the reward does not accept as a reply.
With a run folder, the rewards of the run's samples by source. Nothing is started but the reward function.
"""

from __future__ import annotations

import html
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.doctor.target import find_target
from analysis.report.assemble import ASSETS, save_page
from configs.schema import RLConfig, RunConfig
from core.cli import Parser, run_guarded
from core.errors import UserError, first_line
from core.loading import load_module
from core.text.plain_text import print_line, shorten_middle
from core.text.text_files import parse_json, read_text
from core.types.samples import Prompt
from data_feeds.chat.template_args import make_tokenizer
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.feed import Feed, Source, load_groups, load_prompts
from rewards import load_reward, resolve_reward
from tools.data_measures import Found, count_bins, find_copies, find_near_copies, find_overlap, find_quantiles

EXAMPLES = 5
"""Rows that are shown of each kind."""
LONGEST = 160
"""Characters of a row that is shown."""


@dataclass(kw_only=True)
class SourceReport:
    """Measures of a source."""

    name: str
    form: str
    rows: int
    lengths: dict[str, list[int]]
    """Tokens of the rows, by what they are of."""
    findings: list[tuple[str, int, list[str]]] = field(default_factory=list[tuple[str, int, list[str]]])
    """What was found, in how many rows, and examples."""


def main() -> int:
    parser = Parser("python -m tools.data_report", description="Make one HTML page about the data of a recipe.")
    parser.add_argument("recipe", help="a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--run", type=Path, help="folder of a run with this data: its rewards by source")
    parser.add_argument("--ngram", type=int, default=13, help="successive words that overlap (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("data_report.html"), help="the page (default %(default)s)")
    args = parser.parse_args()
    loaded = find_target(args.recipe, args.overrides).loaded
    train, held_out, tokenizer = load_data(loaded)
    reports = [report_source(s, held_out, tokenizer, loaded.cfg, ngram=args.ngram) for s in train.sources]
    if args.run is not None:
        add_rewards(reports, train, args.run)
    print_line(save_page(args.out, write_page(f"data of {args.recipe}", reports), key="--out"))
    return 0


def load_data(loaded: Any) -> tuple[Feed[Any], Feed[Any] | None, ChatTokenizer]:
    """Load data.train and data.eval, however many rows of them are invalid."""
    cfg: RunConfig = loaded.cfg
    tokenizer = make_tokenizer(cfg.model, cfg.data)
    data = cfg.data.model_copy(update={"max_invalid_fraction": 1.0})

    def load(which: Any) -> Feed[Any]:
        if isinstance(cfg, RLConfig):
            return load_prompts(data, which, tokenizer, seed=cfg.seed)  # pyright: ignore[reportArgumentType]
        return load_groups(data, which, tokenizer, rows=loaded.alg.rows, seed=cfg.seed)  # pyright: ignore[reportArgumentType]

    return load("train"), None if data.eval is None else load("eval"), tokenizer


def report_source(
    source: Source[Any], held_out: Feed[Any] | None, tokenizer: ChatTokenizer, cfg: RunConfig, *, ngram: int
) -> SourceReport:
    items = source.items
    prompts = [item if isinstance(item, Prompt) else item[0].prompt for item in items]
    texts = [write_text(prompt) for prompt in prompts]
    report = SourceReport(
        name=source.name, form=source.form, rows=len(items), lengths=measure_lengths(items, tokenizer)
    )
    for reason, case in source.invalid.cases.items():
        report.findings.append((f"invalid: {reason}", case.rows, [f"{case.example}: {case.why}"]))
    report.findings.append(_describe("copies of an earlier row", find_copies(texts), prompts, texts))
    report.findings.append(_describe("nearly an earlier row", find_near_copies(texts), prompts, texts))
    if held_out is not None:
        asked = [write_text(i if isinstance(i, Prompt) else i[0].prompt) for i in held_out.all()]
        found = find_overlap(texts, asked, n=ngram)
        report.findings.append(_describe(f"{ngram} words of a row of data.eval", found, prompts, texts))
    unseen = Counter(name for prompt in prompts for name in prompt.extra)
    report.findings += [(f"column {name}: not shown to the model", rows, []) for name, rows in unseen.items()]
    if isinstance(cfg, RLConfig):
        report.findings += check_answers(cfg, prompts)
    return report


def write_text(prompt: Prompt) -> str:
    """Return the words of a row, system turns left out: rows often share one."""
    return "\n".join(m["content"] for m in prompt.messages if m["role"] != "system")


def measure_lengths(items: Sequence[Any], tokenizer: ChatTokenizer) -> dict[str, list[int]]:
    if isinstance(items[0], Prompt):
        return {"tokens of the prompt": [len(tokenizer.render(prompt.messages, prompt.tools)) for prompt in items]}
    samples = [sample for group in items for sample in group]
    return {
        "tokens of the row": [len(sample.token_ids) for sample in samples],
        "tokens that are trained on": [sample.n_trained for sample in samples],
    }


def check_answers(cfg: RLConfig, prompts: list[Prompt]) -> list[tuple[str, int, list[str]]]:
    """Give the reward each row's answer as the reply. Rewards that need more than the text are left out."""
    name = cfg.reward.function
    if name is None:
        return [("answers: not tried, since there are several reward functions", 0, [])]
    spec = resolve_reward(name, key="reward.function")
    module = load_module(spec)
    if hasattr(module, "prepare") or hasattr(module, "check"):
        return [(f"answers: not tried, since {name} needs more than the text of a reply", 0, [])]
    score = load_reward(spec, cfg.reward.settings)
    unread: list[str] = []
    refused: list[str] = []
    for prompt in prompts:
        try:
            parts = score(prompt, [{"role": "assistant", "content": prompt.answer}])
        except Exception as error:  # a border: the code is the user's
            unread.append(f"{prompt.id}: {first_line(error)}")
            continue
        if inspect.isawaitable(parts) or not isinstance(parts, dict):
            return [(f"answers: not tried, since {name} does not answer at once", 0, [])]
        if not any(parts.values()):
            refused.append(f"{prompt.id}: {shorten_middle(prompt.answer, LONGEST)!r}")
    return [
        ("answers that the reward cannot read", len(unread), unread[:EXAMPLES]),
        ("answers that earn nothing as a reply", len(refused), refused[:EXAMPLES]),
    ]


def _describe(what: str, found: Found, prompts: list[Prompt], texts: list[str]) -> tuple[str, int, list[str]]:
    shown = [f"{prompts[i].id}: {shorten_middle(texts[i], LONGEST)}" for i in found.rows[:EXAMPLES]]
    return what, len(found.rows), shown


def add_rewards(reports: list[SourceReport], train: Feed[Any], run: Path) -> None:
    """Add the rewards of a run's samples to the reports of their sources."""
    files = sorted((run / "samples").glob("step_*.jsonl"))
    if not files:
        raise UserError(f"--run {run} has no samples/step_*.jsonl: name the folder of an RL run")
    of = {(i if isinstance(i, Prompt) else i[0].prompt).id: s.name for s in train.sources for i in s.items}
    groups: dict[tuple[str, Any], list[float]] = {}
    names: dict[tuple[str, Any], str] = {}
    for file in files:
        for n, line in enumerate(read_text(file, str(file)).splitlines()):
            record = parse_json(line, f"{file}, line {n + 1}")
            if record["reward"] is not None and record["id"] in of:
                group = (file.name, record["group"])
                groups.setdefault(group, []).append(record["reward"])
                names[group] = of[record["id"]]
    for report in reports:
        own = [rewards for group, rewards in groups.items() if names[group] == report.name]
        equal = sum(len(rewards) > 1 and min(rewards) == max(rewards) for rewards in own)
        drawn = [reward for rewards in own for reward in rewards]
        if drawn:
            mean = f"mean reward {sum(drawn) / len(drawn):.3f} of {len(drawn)} samples in {len(own)} groups"
            report.findings.append((f"groups of equal rewards, which teach nothing; {mean}", equal, []))


def write_page(title: str, reports: list[SourceReport]) -> str:
    """Return the page, in the style of the run page, without a script."""
    style = "".join((ASSETS / name).read_text(encoding="utf-8") for name in ("style.css", "samples.css"))
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>{html.escape(title)}</title>"
        f"<style>{style}</style></head><body><h1>{html.escape(title)}</h1>"
    )
    return head + "".join(part for report in reports for part in _write_source(report)) + "</body></html>\n"


def _write_source(report: SourceReport) -> Iterator[str]:
    yield f'<div class="run"><h3>{html.escape(report.name)}</h3>'
    yield f'<p class="hint">{report.rows:,} valid rows of form {html.escape(report.form)}</p>'
    for name, lengths in report.lengths.items():
        quantiles = ", ".join(f"{key} {value:,}" for key, value in find_quantiles(lengths).items())
        counts, edges = count_bins(lengths)
        bars = "".join(
            f'<div class="bar" title="{count:,} rows from {edge:,} tokens on"><span class="bar-fill" '
            f'style="height:{100 * count / max(counts):.0f}px"></span><span class="bar-label">{edge:,}</span></div>'
            for count, edge in zip(counts, edges, strict=False)
        )
        yield f'<h4>{html.escape(name)}: {quantiles}</h4><div class="histogram">{bars}</div>'
    yield "<table><tr><th>found</th><th>rows</th><th>such as</th></tr>"
    for what, rows, examples in report.findings:
        shown = "<br>".join(html.escape(json.dumps(text, ensure_ascii=False)[1:-1]) for text in examples)
        yield f'<tr><td>{html.escape(what)}</td><td class="right">{rows:,}</td><td>{shown}</td></tr>'
    yield "</table></div>"


if __name__ == "__main__":
    sys.exit(run_guarded(main))
