"""Steps of training, each on the CPU and on the pretend CUDA device: every algorithm, every kind of step.

python -m unit_tests.pretend_cuda.steps        prints docs/reference/pretend_cuda.md: waits, copies and seconds
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algs import find_algorithm, list_algorithms
from algs.base import Algorithm, PolicyGradient, assign_advantages
from algs.check.distributions import draw_stored
from algs.totals import prepare_update
from configs.trainer_schema import LoraConfig
from core.cluster.workers import Local
from core.types.allowed_tokens import EVERY_TOKEN, AllowedTokens
from core.types.samples import Group, Sample
from data_feeds.packing.batches import Plan, plan_update
from data_feeds.packing.splice import align, splice
from data_prep import tiny_model
from driver.rl.scoring import compute_columns
from modeling.images.processor import ImageProcessor
from trainers.local import LocalTrainer
from trainers.observers import ObserverFactory
from unit_tests.helpers import seeing
from unit_tests.helpers.examples import a_changed, families, some_answers, with_kept
from unit_tests.helpers.local_trainers import trainer_of
from unit_tests.helpers.models import random_model
from unit_tests.helpers.pretend_cuda import PretendDevice, pretend_cuda
from unit_tests.helpers.variants import NEEDED

READ_OUT = ("trainers/local.py", "trainers/meter.py")
"""Files whose waits are the optimizer's norm and the metrics of a step."""
OTHER_PROMPT = [5, 6, 7]
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded"},
    "packed": {"layout": "packed", "share_prefixes": "off"},
    "shared": {"layout": "packed"},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Step of one algorithm, with the changes of one kind."""

    alg: str = "grpo"
    alg_settings: dict[str, Any] = field(default_factory=dict)
    model: str = "tiny"
    layout: str = "shared"
    attention: str = ""
    """Empty for sdpa in padded rows, and for our kernel in others."""
    dtype: str = "float32"
    text_only: bool = False
    """True for samples without images, of a model that sees."""
    kept: bool = False
    """True for samples with kept sets."""
    updates: int = 1
    max_tokens: int = 60
    lora: LoraConfig | None = None
    allowed_tokens: AllowedTokens = EVERY_TOKEN
    observers: dict[str, ObserverFactory] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Result:
    """Numbers that a step computed, and its waits."""

    gradient: Tensor
    """Change of the float32 weights, flat."""
    metrics: dict[str, float]
    columns: Tensor
    """Scored columns of all samples, flat."""
    syncs: Counter[str]
    """Waits in the step, by line."""
    uploads: int
    """Copies to the device in the step."""
    varlen_calls: int
    seconds: float

    @property
    def other_syncs(self) -> Counter[str]:
        """Waits besides the norm and the metrics."""
        return Counter({line: n for line, n in self.syncs.items() if not line.startswith(READ_OUT)})


KINDS: dict[str, Case] = {
    "several updates": Case(updates=2),
    "smaller micro-batches": Case(max_tokens=25, layout="packed"),
    "entropy, reference": Case(alg_settings={"entropy_coef": 0.01, "kl": {"coef": 0.1}}),
    "no correction": Case(alg_settings={"correction": {"level": "none"}}),
    "value model, clipped": Case(alg="ppo", alg_settings={"value_clip": 0.2}, updates=2),
    "adapters": Case(lora=LoraConfig(r=4), alg_settings={"kl": {"coef": 0.1}}),
    "allowed tokens": Case(allowed_tokens=AllowedTokens(allowed=tuple(range(70)))),
    "banned tokens": Case(allowed_tokens=AllowedTokens(banned=(90, 91)), layout="padded"),
    "kept sets": Case(kept=True, alg_settings={"entropy_coef": 0.01}),
    "kept sets, head in chunks": Case(kept=True, trainer={"logits_mib": 1}, model="wide"),
    "head in chunks": Case(trainer={"logits_mib": 1}, model="wide"),
    "layers computed again": Case(trainer={"gradient_checkpointing": True}),
    "clipped norm, AdamW": Case(trainer={"optimizer": "adamw", "max_grad_norm": 0.1, "lr": 0.01}),
    "a mask of torch's": Case(attention="sdpa", layout="packed"),
    "a mask that is added": Case(attention="eager", layout="packed"),
    "sliding windows": Case(model="windows"),
    "sliding windows, padded": Case(model="windows", layout="padded"),
    "sliding windows, padded, our kernel": Case(model="windows", layout="padded", attention="auto"),
    "images in tiles": Case(alg="sft", model="idefics3", max_tokens=200),
    "images with grids": Case(model="qwen2_5_vl", max_tokens=200),
    "text for a model that sees": Case(alg="sft", model="qwen2_5_vl", text_only=True),
    "images, padded": Case(model="qwen2_5_vl", layout="padded", max_tokens=200),
    "images, frozen tower": Case(model="idefics3", max_tokens=200, trainer={"freeze": ["vision"]}),
}
"""Kinds of step besides the three layouts, which every algorithm takes."""


class Models:
    """Folders of saved models, made where they are first asked for."""

    def __init__(self, home: Path):
        self.home = home

    @cache  # noqa: B019 - one for all tests
    def find(self, name: str) -> str:
        folder = self.home / name
        folder.mkdir()
        match name:
            case "tiny":
                tiny_model.make(folder)
            case "other":
                tiny_model.make(folder, seed=1)
            case "wide":
                random_model("llama", vocab_size=4096).save_pretrained(folder)
            case "windows":
                layers = ["full_attention", "sliding_attention"]
                random_model(
                    "qwen3", use_sliding_window=True, sliding_window=5, layer_types=layers, vocab_size=103
                ).save_pretrained(folder)
            case _:
                seeing.save_model(folder, name)
        return str(folder)


def make_algorithm(case: Case, models: Models) -> Algorithm:
    settings = NEEDED.get(case.alg, {})
    if "teacher" in settings:  # of other weights, or it has nothing to teach
        settings = settings | {"teacher": models.find("other")}
    return find_algorithm({"name": case.alg})[1](**settings | case.alg_settings)


def make_groups(case: Case, alg: Algorithm, models: Models) -> list[Group]:
    if case.model in seeing.FAMILIES:
        groups = seeing.seeing_groups(ImageProcessor(models.find(case.model)))
        groups = [g for g in groups if not (case.text_only and any(s.images for s in g))]
    elif alg.rows == "conversations":
        groups = with_kept(families()) if case.kept else families()
    else:
        groups = some_answers(alg.rows, 5)
    if case.alg == "distill":
        groups = [[with_distributions(s) for s in g] for g in groups]
    return alg.prepare_groups([[a_changed(s, advantage=None) for s in g] for g in groups])


def with_distributions(sample: Sample) -> Sample:
    """Give the row of a sample stored distributions of its trained tokens."""
    stored = draw_stored(sample.token_ids[sample.loss_mask].tolist())
    return replace(sample, prompt=replace(sample.prompt, extra=stored))


def score(case: Case, alg: Algorithm, trainer: LocalTrainer, groups: list[Group]) -> list[Group]:
    """Compute the columns. A teacher with a prompt of its own reads `OTHER_PROMPT` in place of the policy's."""
    workers, columns = Local(trainer), needed_columns(case, alg)
    for name in [name for name, teacher in alg.teachers.items() if teacher.prompt is not None]:
        rows = [[splice(s, OTHER_PROMPT) for s in g] for g in groups]
        done = asyncio.run(compute_columns(workers, rows, plan(case, alg, rows, apart=True), frozenset({name})))
        groups = [
            [replace(s, columns=s.columns | {name: align(s, row, name)}) for s, row in zip(g, own, strict=True)]
            for g, own in zip(groups, done, strict=True)
        ]
        columns -= {name}
    return asyncio.run(compute_columns(workers, groups, plan(case, alg, groups), columns))


def train(case: Case, models: Models, device: PretendDevice | None = None) -> Result:
    """Score, credit and train as a run does, on the device that torch has now."""
    begun = time.perf_counter()
    alg = make_algorithm(case, models)
    torch.manual_seed(0)
    given = LAYOUTS[case.layout] | {"lr": 0.5} | case.trainer
    more = {"allowed_tokens": case.allowed_tokens, "observers": case.observers}
    attention = case.attention or ("sdpa" if case.layout == "padded" else "auto")
    trainer = trainer_of(
        models.find(case.model), alg, dtype=case.dtype, attention=attention, lora=case.lora, settings=more, **given
    )
    if trainer.critic is not None:  # else all values are 0
        head: Any = trainer.critic.model.score
        head.weight.data.copy_(torch.linspace(-1, 1, head.in_features)[None])
    groups = make_groups(case, alg, models)
    scored = score(case, alg, trainer, groups)
    credited = prepare_update(alg, assign_advantages(alg, scored))
    before = read_master(trainer)
    micro_batches = plan(case, alg, credited).batches()[0]
    device = device or PretendDevice()  # on the CPU it stays empty
    device.clear()
    metrics = trainer.step([micro_batches] * case.updates)
    syncs, uploads, varlen_calls = Counter(device.syncs), device.uploads.total(), device.varlen_calls
    columns = [torch.tensor(s.columns[c]).flatten() for g in scored for s in g for c in sorted(s.columns)]
    return Result(
        gradient=before - read_master(trainer),
        metrics=metrics,
        columns=torch.cat([*columns, torch.zeros(1)]),
        syncs=syncs,
        uploads=uploads,
        varlen_calls=varlen_calls,
        seconds=time.perf_counter() - begun,
    )


def needed_columns(case: Case, alg: Algorithm) -> frozenset[Any]:
    is_stale = case.updates > 1 and isinstance(alg, PolicyGradient)
    return alg.required_columns | (frozenset({"prox_logp"}) if is_stale else frozenset())


def plan(case: Case, alg: Algorithm, groups: list[Group], *, apart: bool = False) -> Plan:
    """Split groups into micro-batches. apart: rows of a teacher, which need not be together."""
    cut: dict[str, Any] = {"padded": case.layout == "padded", "share_prefixes": case.layout == "shared"}
    whole = {"whole_groups": alg.whole_groups, "whole_episodes": alg.whole_episodes, "terms": alg.terms}
    whole = {} if apart else whole
    return plan_update(groups, alg.loss_norm, case.max_tokens, horizon=10, **cut, **whole)


def read_master(trainer: LocalTrainer) -> Tensor:
    """Return the float32 weights that are trained, as a flat vector on the CPU."""
    learners: list[Any] = [trainer.policy, *([trainer.critic] if trainer.critic is not None else [])]
    return torch.cat([w.detach().cpu().flatten() for learner in learners for w in learner.master])


def train_on_both(case: Case, models: Models) -> tuple[Result, Result]:
    """Return the results of the CPU and of the pretend device."""
    of_cpu = train(case, models)
    with pretend_cuda() as device:
        return of_cpu, train(case, models, device)


def list_cases() -> dict[str, Case]:
    """Return every algorithm in every layout, and every kind of step."""
    of_algs = {
        f"{alg}, {how}": Case(alg=alg, layout=how, max_tokens=90) for alg in list_algorithms() for how in LAYOUTS
    }
    return of_algs | KINDS


def main() -> None:
    """Print the tables of docs/reference/pretend_cuda.md. Exit code 1 where a step differs from the CPU's."""
    torch.set_num_threads(1)
    found: dict[str, Result] = {}
    others: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for name, case in list_cases().items():
            want, got = train_on_both(case, models)
            found[name] = replace(got, seconds=want.seconds + got.seconds)
            if not (torch.equal(got.gradient, want.gradient) and got.metrics == want.metrics):
                others.append(name)
    print("| algorithm | padded | packed | shared prefixes | seconds |", "|---|---|---|---|---|", sep="\n")
    for alg in list_algorithms():
        results = [found[f"{alg}, {how}"] for how in LAYOUTS]
        cells = [*map(write_counts, results), f"{sum(result.seconds for result in results):.1f}"]
        print(f"| {alg} | {' | '.join(cells)} |")
    print("", "| kind of step | waits/copies | waits besides | seconds |", "|---|---|---|---|", sep="\n")
    for kind in KINDS:
        files = ", ".join(f"`{line.partition(':')[0]}` x{n}" for line, n in found[kind].other_syncs.items())
        print(f"| {kind} | {write_counts(found[kind])} | {files} | {found[kind].seconds:.1f} |")
    seconds = sum(result.seconds for result in found.values())
    print(f"\n{len(found)} steps, {seconds:.0f} s; other numbers than the CPU's: {', '.join(others) or 'none'}")
    sys.exit(bool(others))


def write_counts(result: Result) -> str:
    return f"{result.syncs.total()}/{result.uploads}"


if __name__ == "__main__":
    main()
