"""The generated pages: python -m tools.docs --write makes them all, and a test compares them with the code.

docs/reference/ comes from the schema, the algorithms' docstrings and fields, core/metrics.py and
core/timing/deadlines.py. configs/README.md and algs/LIBRARY.md are short tables that link there. One table of
docs/concepts/one_step.md is made, too. configs/editor/ has the schemas for editors.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from algs import find_algorithm, list_algorithms
from algs.base import Algorithm, GroupRelative, PolicyGradient, TurnCredit
from algs.terms import KL, Correction, Overlong
from configs.data_schema import HoldOutConfig, SourceConfig
from configs.eval_schema import EvalConfig, EvalDataConfig, EvalModelConfig, EvalRolloutConfig, EvalSetConfig
from configs.judge_schema import JudgeBudgetConfig
from configs.other_names import NOT_HERE, OTHER_NAMES
from configs.rollout_schema import EngineRange, RolloutConfig
from configs.schema import RLConfig, RunConfig, SLConfig
from configs.trainer_schema import LoraConfig
from core.loading import load_module
from core.metrics import METRICS
from core.timing.deadlines import TABLE
from data_feeds.rows.forms import FORMS, ORIGINS, Form, Turns
from tools.editor_schema import editor_schemas
from tools.papers import make_table
from tools.zoo.page import make_page, read_lines

ROOT = Path(__file__).parent.parent
MADE = "<!-- made by `python -m tools.docs --write`; a test compares it with the code -->"
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""Words for the names that pydantic gives to bounds."""


def pages() -> dict[Path, str]:
    """Return every generated page with its text."""
    reference = ROOT / "docs" / "reference"
    one_step = ROOT / "docs" / "concepts" / "one_step.md"
    return {
        ROOT / "configs" / "README.md": recipes(),
        ROOT / "algs" / "LIBRARY.md": algorithm_index(),
        reference / "configuration.md": configuration(),
        reference / "algorithms.md": algorithms(),
        reference / "metrics.md": metrics(),
        reference / "deadlines.md": deadlines(),
        reference / "forms.md": forms(),
        reference / "other_names.md": other_names(),
        reference / "papers.md": papers(),
        reference / "models.md": make_page(read_lines(reference / "models.jsonl")),
        one_step: count_lines(one_step.read_text()),
    } | editor_schemas()


def recipes() -> str:
    """List the recipes, each with its first line."""
    parts = [
        *begin_page(
            "Recipes",
            "A recipe is a YAML file that states what differs from the defaults. "
            "[Configuration](../docs/reference/configuration.md) lists every key.",
        ),
        *("", "| recipe | what it does |", "|---|---|"),
    ]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        # the first comment of a recipe is its title
        first = path.read_text().splitlines()[0].removeprefix("# ")
        parts.append(f"| [`{path.name}`]({path.name}) | {first} |")
    parts += ["", "Recipes of papers, in `papers/`: [Papers](../docs/reference/papers.md)."]
    return "\n".join(parts) + "\n"


def papers() -> str:
    """List the recipes of papers."""
    page = begin_page(
        "Papers",
        "Each recipe of `configs/papers/` is a paper's loss on the quickstart's task: run `make quickstart`, then the "
        "recipe. All differ from their paper in model and task, and in settings that they leave at our defaults: the "
        "correction for the engine is on unless a recipe says otherwise. A case is a set of numbers by an independent "
        "oracle, which the recipe's loss and gradient equal to 1e-9, under the settings in its head. Every recipe "
        "trains two steps in `make verify`, and five of them in CI, by turns.",
    )
    return "\n".join([*page, "", *make_table()]) + "\n"


def forms() -> str:
    """List the forms of rows that are recognised, by kind of row."""
    parts = begin_page(
        "Forms of rows",
        "Exactly one form must fit the columns and the first 200 rows of a source. The run says which it is, and "
        "its `config.yaml` names it; `form` of the source names it yourself. `a`/`b`: a data set has one of both. "
        "Columns that no form reads are in `prompt.extra`. See [Bring a data set](../how_to/data_set.md).",
    )
    titles = {
        "conversations": "Conversations, for supervised learning",
        "pairs": "Pairs (DPO, reward models)",
        "unpaired": "Replies with a label (KTO, BCO)",
        "scored": "Replies with rewards (offline DRO)",
        "prompts": "Prompts, for reinforcement learning",
    }
    for kind, title in titles.items():
        parts += ["", f"## {title}", "", "| `form` | used by | columns | what it becomes |", "|---|---|---|---|"]
        parts += [describe_form(form) for form in FORMS if form.kind == kind]
    return "\n".join(parts) + "\n"


def describe_form(form: Form) -> str:
    """Return the line of a form in the table of forms."""

    def name(path: str) -> str:
        return "/".join(f"`{one}`" for one in path.split("|"))

    made = [
        f"`{ours}`: {' + '.join(map(name, source.columns)) if isinstance(source, Turns) else name(source)}"
        for ours, source in form.fields.items()
        if (source.columns if isinstance(source, Turns) else (source,)) != (ours,)
    ]
    needs = ", ".join(map(name, form.needs))
    settings = "".join(f"; needs `{key}: {value}`" for key, value in form.settings.items())
    becomes = f"refused: {form.refusal}" if form.refusal else ("; ".join(made) or "our columns") + settings
    return f"| `{form.name}` | {ORIGINS[form.name]} | {needs} | {becomes} |"


def configuration() -> str:
    """Return the page of all configuration keys, from the schema's fields and their docstrings."""
    parts = begin_page(
        "Configuration",
        "A recipe is a YAML file. It states what differs from the defaults below. `key=value` on the command line "
        "overrides it (`trainer.lr=1e-5`). `base: other.yaml` builds on another recipe. An unknown key is "
        "refused. `--explain` prints the resolved configuration and what follows from it, and starts nothing. The "
        "recipes of this repository: [configs/README.md](../../configs/README.md).",
    )
    shared = set(RunConfig.model_fields)
    parts += section("Every run", "", RunConfig)
    parts += section("Reinforcement learning (main_rl.py)", "", RLConfig, leave_out=shared)
    parts += section("Supervised learning (main_sl.py)", "", SLConfig, leave_out=shared)
    parts += section("Evaluation (main_eval.py)", "", EvalConfig)
    for name, field in RLConfig.model_fields.items():
        if name == "data":
            parts += data_sections()
        elif is_section(field.annotation):
            parts += section(f"`{name}`", f"{name}.", field.annotation)
        if name == "model":
            parts += section("`model.lora`", "model.lora.", LoraConfig)
        if name == "reward":
            parts += section("`reward.judge_budget`", "reward.judge_budget.", JudgeBudgetConfig)
        if name == "rollout":
            parts += section("`rollout.num_engines`, where engines come and go", "rollout.num_engines.", EngineRange)
    parts += eval_sections()
    parts += ["", "The keys under `alg` belong to the algorithm: see [Algorithms](algorithms.md)."]
    return "\n".join(parts) + "\n"


def data_sections() -> list[str]:
    """List the keys of `data`: of both programs, of each program, and of a source."""
    both = RLConfig.model_fields["data"].annotation, SLConfig.model_fields["data"].annotation
    assert both[0] is not None and both[1] is not None
    # each table leaves out what another one lists, so that every key is listed once
    of_rl, of_sl = ({*cls.model_fields} for cls in both)
    parts = section("`data`, in every run", "data.", both[0], leave_out=of_rl - of_sl)
    parts += section("`data`, in reinforcement learning", "data.", both[0], leave_out=of_sl)
    parts += section("`data`, in supervised learning", "data.", both[1], leave_out=of_rl)
    parts += section("A source: an entry of the list `data.train`, or `data.eval`", "", SourceConfig)
    return parts + section("`data.eval`, with rows of data.train", "data.eval.", HoldOutConfig)


def eval_sections() -> list[str]:
    """List the evaluation keys that training does not have."""
    of_rl = {*RolloutConfig.model_fields} - {"temperature"}
    parts = section("`model`, in an evaluation", "model.", EvalModelConfig)
    parts += section("`data`, in an evaluation", "data.", EvalDataConfig)
    parts += section("A data set: an entry of the list `data.sets`", "", EvalSetConfig)
    parts += section("`rollout`, in an evaluation", "rollout.", EvalRolloutConfig, leave_out=of_rl)
    return [*parts, "", "The other keys of `rollout`, and those of `reward`, are those of reinforcement learning."]


def algorithm_index() -> str:
    """List the algorithms, each with the first line of its docstring."""
    parts = ["# The algorithms", "", MADE, "", "| `alg.name` | what it is |", "|---|---|"]
    for name in list_algorithms():
        first = (load_module(find_algorithm({"name": name})[0]).__doc__ or "").strip().splitlines()[0]
        parts.append(f"| [`{name}`](../docs/reference/algorithms.md#{name}) | {first} |")
    return "\n".join(parts) + "\n"


def algorithms() -> str:
    """Print every algorithm's docstring, and the keys that it declares itself."""
    parts = begin_page(
        "Algorithms",
        "A is the advantage. pi is the policy in training, pi_prox the same policy when the step began, "
        "pi_rollout the engine's. sg[] stops the gradient. L_t is the loss of one trained token, L_b of one "
        "sequence; `loss_norm` says how they are averaged. How to write your own: [Write an "
        "algorithm](../how_to/algorithm.md).",
    )
    for name in list_algorithms():
        spec, cls = find_algorithm({"name": name})
        parts += ["", f"## {name}", "", "```text", (load_module(spec).__doc__ or "").strip(), "```"]
        # inherited keys are listed once, at the end of the page
        own = set(cls.model_fields) - set(cls.__annotations__)
        if cls.__annotations__.keys() & cls.model_fields.keys():
            parts += section("", "alg.", cls, leave_out=own)[2:]
    parts += section("Keys of every algorithm", "alg.", Algorithm)
    parts += section(
        "Keys of every policy-gradient algorithm", "alg.", PolicyGradient, leave_out={*Algorithm.model_fields}
    )
    for name, part in (("correction", Correction), ("kl", KL), ("overlong", Overlong)):
        parts += section(f"`alg.{name}`", f"alg.{name}.", part)
    title = "Keys of those that credit turns: the group-relative ones, ppo and reinforce_pp"
    parts += section(title, "alg.", TurnCredit, leave_out={*PolicyGradient.model_fields})
    parts += section("Keys of the group-relative ones", "alg.", GroupRelative, leave_out={*TurnCredit.model_fields})
    return "\n".join(parts) + "\n"


def metrics() -> str:
    """List every metric, by the part of its name before the first slash."""
    parts = begin_page(
        "Metrics",
        "Every line of `metrics.jsonl` is one step, or one evaluation on data.eval. The `step` of an evaluation is the "
        "number of steps behind its weights: 0 before training. These are all names that it may hold. `<part>` is a "
        "part of the reward, `<source>` a source of a mixture, `<n>` a number. How to use them: [Read the "
        "log](../how_to/reading_the_log.md).",
    )
    for area in dict.fromkeys(metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name):
        parts += metric_rows(f"{area}/", [m for m in METRICS if m.name.startswith(f"{area}/")])
    parts += metric_rows("Without a prefix", [m for m in METRICS if "/" not in m.name])
    return "\n".join(parts) + "\n"


def metric_rows(title: str, found: list[Any]) -> list[str]:
    rows = ["", f"## {title}", "", "| name | unit | meaning | logged by |", "|---|---|---|---|"]
    for metric in found:
        rows.append(f"| `{metric.name}` | {metric.unit} | {escape(metric.meaning)} | {metric.logged_by} |")
    return rows


def deadlines() -> str:
    """List every deadline with its consequence."""
    parts = [
        *begin_page(
            "Deadlines",
            "Nothing in a run waits without a limit. A length in code format is a key of the recipe; the others are "
            "constants in `core/timing/deadlines.py`. An outer wait is longer than the inner one, so that the process "
            "that knows the reason reports.",
        ),
        *("", "| what is waited for | how long | after it |", "|---|---|---|"),
    ]
    parts += [f"| {row.waits_for} | {row.length} | {row.after_it} |" for row in TABLE]
    return "\n".join(parts) + "\n"


def other_names() -> str:
    """List our keys with their names in other frameworks."""
    rows = begin_page(
        "Names in other frameworks",
        "A recipe with one of these names is refused, and the error says ours. The sections above a name may be left "
        "out. Where meaning or default differs: [TRL](../coming_from/trl.md), [verl](../coming_from/verl.md), "
        "[OpenRLHF](../coming_from/openrlhf.md).",
    )
    rows += ["", "| FeynRL | TRL | verl | OpenRLHF |", "|---|---|---|---|"]
    for row in OTHER_NAMES:
        theirs = [", ".join(f"`{name}`" for name in names) for names in (row.trl, row.verl, row.openrlhf)]
        ours = re.sub(r"[a-z_]+(?:\.[a-z_]+)*(?:: \w+)?", r"`\g<0>`", row.ours).replace("`and`", "and")
        rows.append(f"| {ours}{f'; {row.note}' if row.note else ''} | {' | '.join(theirs)} |")
    rows += [f"| none: {reason} | {', '.join(f'`{name}`' for name in names)} | | |" for reason, names in group_absent()]
    return "\n".join(rows) + "\n"


def group_absent() -> list[tuple[str, list[str]]]:
    """List the reasons why a key has no counterpart, each with the keys."""
    reasons = dict.fromkeys(NOT_HERE.values())
    return [(reason, [name for name, why in NOT_HERE.items() if why == reason]) for reason in reasons]


def count_lines(page: str) -> str:
    """Return a page with the line counts of its tables of files made again; tools/walks.py chooses the files."""
    made: list[str] = []
    total = files = 0
    for line in page.split("\n"):
        # only counts and summaries are made anew: the list of files comes from a traced run, which takes minutes
        if found := re.match(r"\| \[`([\w/]+\.py)`\]\(\S+\) \| \d+ \| (.*)$", line):
            n = len((ROOT / found[1]).read_text(encoding="utf-8").splitlines())
            line = f"| [`{found[1]}`](../../{found[1]}) | {n} | {summarize(found[1])} |"
            total, files = total + n, files + 1
        elif line.startswith("| together |"):
            line, total, files = f"| together | {total:,} | {files} files |", 0, 0
        made.append(line)
    return "\n".join(made)


def summarize(file: str) -> str:
    """Return the first sentence of a file's docstring."""
    said = " ".join((ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or "").split())
    # a dot after a word and before a space: `core.types` is no end of a sentence
    return escape(re.split(r"(?<=\w)\.(?:\s|$)", said, maxsplit=1)[0])


def begin_page(title: str, text: str) -> list[str]:
    """Return the first lines of a page: title, the remark that it is generated, and an introduction."""
    return [f"# {title}", "", MADE, "", textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)]


def section(title: str, prefix: str, cls: type[BaseModel], leave_out: set[str] = frozenset()) -> list[str]:
    rows = ["", f"## {title}", "", "| key | default | meaning |", "|---|---|---|"]
    for name, field in cls.model_fields.items():
        if name in leave_out or is_section(field.annotation):
            continue
        meaning = escape(" ".join((field.description or "").split()))
        rows.append(f"| `{prefix}{name}` | {default_of(field)} | {choices_of(field)}{meaning} |")
    return rows


def escape(text: str) -> str:
    """Keep a table's cell from ending early, and a placeholder such as <name> from being read as HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "unset" if field.default is None else f"`{field.default}`" if field.default != "" else "unset"


def choices_of(field: FieldInfo) -> str:
    options = [a for a in get_args(field.annotation) if isinstance(a, str | int)]
    listed = f"One of {', '.join(f'`{o}`' for o in options)}. " if options else ""
    bounds = [f"{word} {getattr(b, name)}" for b in field.metadata for name, word in BOUNDS.items() if hasattr(b, name)]
    return listed + (f"{', '.join(bounds).capitalize()}. " if bounds else "")


if __name__ == "__main__":
    for path, text in pages().items():
        if "--write" in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            print(text)
