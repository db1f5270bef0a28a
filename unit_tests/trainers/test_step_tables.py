"""Metrics, observers and columns of a training step, in exact numbers and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algs.objective import Objective
from core.errors import RunStopped
from trainers.columns import group_by_model, score_columns
from trainers.invariant import FirstPass
from trainers.meter import Meter, SharedNames, SourceLosses, StepMetrics
from trainers.observers import Observer, Observers
from trainers.routes import RouteMetrics


def alone(values: Tensor) -> Tensor:
    return values


def two(values: Tensor) -> Tensor:
    """Two ranks that are alike."""
    return 2 * values


# Metrics ------------------------------------------------------------------------------------------------------


def test_means_are_over_tokens_and_a_value_without_weight_has_none():
    meter, other = Meter(), Meter()
    meter.add(torch.tensor([1.0, 3.0]), {"b": torch.tensor([2.0, 4.0]), "a": torch.tensor([1, 0])})
    other.add(torch.tensor([4.0]), {"b": torch.tensor([8.0])})
    other.add(torch.tensor([0.0, 0.0, 0.0]), {"never": torch.tensor([1.0, 2.0, 3.0])})
    meter.merge(other)
    want = {"tokens": 6.0, "a": 1 / 4, "b": (2 + 12 + 32) / 8}
    assert meter.compute_means(alone) == want and meter.compute_means(two) == want | {"tokens": 12.0}
    assert all(pair.dtype == torch.float64 for pair in meter.sums.values())
    assert Meter().compute_means(alone) == {"tokens": 0.0}
    assert Meter(tokens=2.0**24 + 1).compute_means(alone) == {"tokens": 2.0**24 + 1}, "more than float32 counts"


def test_an_objective_of_terms_has_means_over_the_tokens_of_each():
    meter, loss = Meter(), torch.tensor([1.0, 3.0], requires_grad=True)
    meter.add_objective(torch.tensor([1.0, 1.0]), Objective(loss=loss, metrics={"m": torch.tensor([5.0, 7.0])}))
    assert meter.compute_means(alone) == {"tokens": 2.0, "loss": 2.0, "m": 6.0}
    terms = [(torch.tensor([2.0]), {"x": torch.tensor([4.0])}), (torch.tensor([1.0, 3.0]), {"y": torch.tensor([0, 8])})]
    meter = Meter()
    meter.add_objective(torch.tensor([1.0, 1.0, 1.0]), Objective(loss=torch.ones(3), of_terms=terms))
    assert meter.compute_means(alone) == {"tokens": 3.0, "x": 4.0, "y": 6.0}
    mixed = Objective(
        loss=torch.ones(1), metrics={"m": torch.tensor([2.0])}, of_terms=[(torch.ones(1), {"x": loss[:1]})]
    )
    meter = Meter()
    meter.add_objective(torch.ones(1), mixed)
    assert meter.compute_means(alone) == {"tokens": 1.0, "m": 2.0, "x": 1.0}


def test_ranks_with_other_names_of_metrics_stop_the_run():
    says = (
        "ranks cannot average metrics that not all of them have (seen here: {}): let the loss return the same names "
        "for every micro-batch, whatever its tokens"
    )

    def ranks_of(*names: list[str]):
        """Sum the marks of ranks with these names."""
        marks: list[Tensor] = []
        for own in names:
            SharedNames().check(own, lambda mark: marks.append(mark) or mark)
        return lambda _: sum(marks)

    for others in (["a"], ["a", "c"], ["b", "a"]):
        with pytest.raises(RunStopped) as raised:
            SharedNames().check(["a", "b"], ranks_of(["a", "b"], others))
        assert str(raised.value) == says.format("a, b")
    for ranks in (2, 3):
        shared = SharedNames()
        shared.check([], lambda _: pytest.fail("no rank made an update"))
        shared.check(["a", "b"], ranks_of(*[["a", "b"]] * ranks))
        assert shared.names == ["a", "b"] and shared.ranks == ranks
        shared.check(["a", "b"], lambda _: pytest.fail("known already"))
        shared.check([], lambda _: pytest.fail("nothing to average"))
        with pytest.raises(RunStopped) as raised:
            shared.check(["a", "d", "c"], alone)
        assert str(raised.value) == says.format("b, c, d")
    single = SharedNames()
    single.check(["a"], alone)
    single.check(["b"], alone)  # one rank sums alone


def seen_of(weight: list[float], loss: list[float], sources: list[int], logp: Tensor | None = None) -> Any:
    tokens = SimpleNamespace(weight=torch.tensor(weight), source_ids=torch.tensor(sources))
    policy = None if logp is None else SimpleNamespace(logp=logp)
    return SimpleNamespace(
        batch=SimpleNamespace(tokens=tokens), objective=Objective(loss=torch.tensor(loss)), policy=policy
    )


def test_a_skipped_update_is_counted_and_leaves_no_number():
    rank: Any = SimpleNamespace(sum_over_rows=alone)
    of_step, of_sources = StepMetrics(rank), SourceLosses(rank, sources=("a", "b", "c"))
    norms = [{"grad_norm": 1.0, "value/grad_norm": 4.0}, {}, {"grad_norm": 3.0, "value/grad_norm": 5.0}]
    for _ in range(2):  # a step begins anew
        for observer in (of_step, of_sources):
            observer.begin_step()
            for at, norm in enumerate(norms):
                observer.begin_update()
                observer.on_batch(seen_of([1.0, 3.0], [2.0 + at, 6.0], [0, 1]))
                observer.on_update(norm)
        want = {"tokens": 4.0, "loss": (2 + 18 + 4 + 18) / 8, "grad_norm": 2.0, "value/grad_norm": 4.5}
        assert of_step.finish() == want | {"updates_skipped": 1.0}
        assert of_sources.finish() == {"loss/a": 3.0, "loss/b": 6.0}
    of_step.begin_step()
    of_step.begin_update()
    of_step.on_update({})
    assert of_step.finish() == {"tokens": 0.0, "updates_skipped": 1.0}


def test_observers_are_called_in_order_and_found_by_their_key():
    notes: list[str] = []

    class Noting(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def begin_step(self) -> None:
            notes.append(f"{self.name} step")

        def begin_update(self) -> None:
            notes.append(f"{self.name} update")

        def on_batch(self, seen: Any) -> None:
            notes.append(f"{self.name} {seen}")

        def on_update(self, norms: Any) -> None:
            notes.append(f"{self.name} {norms}")

        def finish(self) -> dict[str, float]:
            return {self.name: 1.0, "last": float(ord(self.name))}

    observers: Any = Observers({"first": Noting("a"), "second": Noting("b"), "silent": Observer()})
    observers.begin_step()
    observers.begin_update()
    observers.on_batch("batch")
    observers.on_update({"n": 1})
    assert notes == [f"{name} {what}" for what in ("step", "update", "batch", {"n": 1}) for name in "ab"]
    assert observers.finish() == {"a": 1.0, "b": 1.0, "last": 98.0}
    assert observers.second.name == "b"
    with pytest.raises(AttributeError, match=r"^there is no observer third$"):
        _ = observers.third


def test_the_first_pass_of_a_step_is_that_of_its_first_update():
    first = FirstPass(object())
    assert first.take() == []
    for step in range(2):
        first.begin_step()
        for update in range(2):
            first.begin_update()
            for batch in range(2):
                first.on_batch(seen_of([1.0], [1.0], [0], torch.tensor([100.0 * step + 10 * update + batch])))
            first.on_batch(seen_of([1.0], [1.0], [0]))
        assert [logp.tolist() for logp in first.take()] == [[100.0 * step], [100.0 * step + 1]]


def test_routes_are_counted_over_sequence_groups_and_rows():
    class Counts:
        def flatten(self) -> Tensor:
            return torch.tensor([1.0, 2.0])

        def read(self, total: Tensor) -> dict[str, float]:
            return dict(zip("ab", total.tolist(), strict=True))

    class Routes:
        counts, cleared = Counts(), 0

        def clear(self) -> None:
            self.cleared += 1

    rank: Any = SimpleNamespace(routes=Routes(), sequence_group=None, sum_over_rows=two)
    metrics = RouteMetrics(rank)
    metrics.begin_step()
    assert rank.routes.cleared == 1 and metrics.finish() == {"a": 2.0, "b": 4.0}
    rank.sequence_group = SimpleNamespace(sum=lambda values: 3 * values)
    assert metrics.finish() == {"a": 6.0, "b": 12.0}
    rank.routes = None
    metrics.begin_step()
    assert metrics.finish() == {}


# Columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "models"),
    [
        (["prox_logp"], {"prox": ["prox_logp"]}),
        (["values", "ref_logp"], {"ref_logp": ["ref_logp"], "values": ["values"]}),
        (["prox.b", "prox_logp", "prox.a"], {"prox": ["prox.a", "prox.b", "prox_logp"]}),
        (["math.v2", "math.v2.kl", "ref_logp.kl"], {"math.v2": ["math.v2", "math.v2.kl"], "ref_logp": ["ref_logp.kl"]}),
        ([], {}),
    ],
)
def test_the_columns_of_a_model_are_one_forward_pass(columns, models):
    found = group_by_model(frozenset(columns), ["math.v2", "ref_logp"])
    assert found == models and [*found] == [*models]


@dataclass
class Batch:
    name: str
    routes: str | None = "recorded"


def test_every_model_scores_its_columns_in_one_order_and_place():
    """Calls of three batches: frozen, live and adapted models rest, and one that moves changes places once."""
    notes: list[str] = []

    class Place:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            notes.append(f"in {self.name}")

        def __exit__(self, *_: Any) -> None:
            notes.append(f"out {self.name}")

    def forward(batch: Any, *, frozen: Any = None, measures: Any) -> Any:
        routes = "with routes" if batch.routes else "without"
        notes.append(f"{batch.name} {frozen or 'policy'} {sorted(measures)} {routes}")
        return SimpleNamespace(
            logp=torch.tensor([len(notes)]), measures={name: torch.tensor([-1.0]) for name in measures}
        )

    def values_of(critic: Any, batch: Any) -> Tensor:
        notes.append(f"{batch.name} {critic}")
        return torch.tensor([7.0])

    teachers = {"frozen": "path", "live": "live", "base": "start", "moves": "start"}
    trainer: Any = SimpleNamespace(
        alg=SimpleNamespace(teachers={name: SimpleNamespace(model=model) for name, model in teachers.items()}),
        policy="policy",
        critic="critic",
        model=SimpleNamespace(disable_adapter=lambda: Place("base")),
        frozen={"frozen": "a model"},
        references={"moves": SimpleNamespace(in_place_of=lambda policy: Place(f"moves for {policy}"))},
        measures=SimpleNamespace(columns={"prox": {"prox.h": "measure"}, "moves": {"moves.h": "measure"}}),
        load=lambda batch: batch,
        forward=forward,
        compute_values_of=values_of,
    )
    columns = ["frozen", "live", "base", "moves", "moves.h", "values", "prox_logp", "prox.h"]
    found = score_columns(trainer, [Batch("one"), Batch("two")], frozenset(columns))  # type: ignore[list-item]
    want: list[str] = []
    for name in ("one", "two"):
        want += ["in base", f"{name} policy [] without", "out base", f"{name} a model [] without"]
        want += [f"{name} policy [] without", f"{name} policy ['prox.h'] with routes", f"{name} critic"]
    want += ["in moves for policy", "one policy ['moves.h'] without", "two policy ['moves.h'] without"]
    assert notes == [*want, "out moves for policy"]
    assert [sorted(one) for one in found] == [sorted(columns)] * 2
    one = {name: value.tolist() for name, value in found[0].items()}
    assert one["values"] == [7.0] and one["prox.h"] == one["moves.h"] == [-1.0] and one["base"] == [2]
    assert all(isinstance(value, np.ndarray) for value in found[1].values())
