"""What a forward pass gives to the model, the softmax and the measures, and what the head in chunks does by itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from core.errors import UserError
from core.types.allowed_tokens import AllowedTokens
from core.types.kept_sets import KeptSets, KeptTokens
from core.types.measures import ENTROPY, Measure
from core.types.samples import Batch
from modeling.forward import compute_states, compute_values, forward
from modeling.head import ScoringHead, compute_hidden, finish_logits, get_head, score_in_chunks, use_scoring_head
from modeling.layout_probe import compute_scores
from modeling.softmax import KeptStates, normalize
from unit_tests.helpers.models import compute_policy, packed, random_model, some_samples

pytestmark = pytest.mark.usefixtures("one_thread")


class Engine(nn.Module):
    """Callable around a model, as DeepSpeed's, which keeps what it was given."""

    def __init__(self, model: nn.Module, change: Any = lambda logits: logits) -> None:
        super().__init__()
        self.inside, self.change, self.seen = model, change, list[dict[str, Any]]()

    def forward(self, **inputs: Any) -> Any:
        self.seen.append(inputs)
        return SimpleNamespace(logits=self.change(self.inside(**inputs).logits))


@pytest.fixture
def chunks(monkeypatch) -> int:
    """Megabytes of logits with which the head computes four tokens at a time."""
    monkeypatch.setattr("modeling.head.COPIES_AT_ONCE", 2**20)
    monkeypatch.setattr("modeling.head.BYTES_PER_LOGIT", 2**12)
    return 1


def make_model(**more: Any) -> Any:
    model: Any = random_model("llama", num_hidden_layers=1, **more)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))  # so that no distribution is flat
    return model


def make_scalar() -> Any:
    config = random_model("llama", num_hidden_layers=1).config
    config.num_labels = 2
    return AutoModelForSequenceClassification.from_config(config)


def some_batch() -> Batch:
    return packed(some_samples(9, 5))


def all_logits(model: nn.Module, batch: Batch) -> Tensor:
    """The logits at the positions of trained tokens, [M, V], each sequence by itself."""
    parts = batch.input_ids.split(batch.lengths.tolist())
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in parts])[batch.at]


def test_no_pass_of_training_keeps_a_cache(chunks):
    engine, scalar, batch = Engine(make_model()), Engine(make_scalar()), some_batch()
    model: Any = engine.inside
    whole = forward(engine, model, batch, layout="padded", temperature=1.0)
    chunked = forward(engine, model, batch, layout="padded", temperature=1.0, logits_mib=chunks)
    torch.testing.assert_close(chunked.logp, whole.logp)
    compute_states(engine, model, batch, layout="padded")
    compute_values(scalar, batch, layout="padded", model=scalar.inside)
    compute_scores(scalar, scalar.inside, batch, layout="padded")
    given = [*engine.seen, *scalar.seen]
    assert len(given) == 5 and all(inputs.pop("use_cache") is False for inputs in given)
    assert all(inputs.keys() == {"input_ids"} for inputs in given)


LABELS = tuple(some_batch().labels.tolist())
MEASURES = {
    **ENTROPY,
    "own": Measure(lambda s, at: s.gather(-1, at.labels[:, None])[:, 0] * at.column("rollout_logp")),
    "gap": Measure(lambda s, at: (s - at.teacher("ref")).abs().sum(-1), teachers=("ref",)),
}


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("support", ["all", "allowed", "banned", "kept"])
def test_log_probabilities_and_measures_are_those_of_whole_logits(chunks, support, is_chunked):
    model, batch = make_model(), some_batch()
    allowed = AllowedTokens()
    if support == "allowed":
        allowed = AllowedTokens(allowed=tuple(sorted({*range(0, 64, 3), *LABELS})))
    elif support == "banned":
        allowed = AllowedTokens(banned=tuple(sorted({0, 1, 7, 33} - {*LABELS})))
    elif support == "kept":
        sets = [sorted({3, 40, 50 - i, label}) for i, label in enumerate(LABELS)]
        batch.kept = KeptTokens.of(KeptSets.of_lists(sets))
    others = torch.randn(len(LABELS), 64, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"temperature": 0.7, "measures": MEASURES, "allowed_tokens": allowed}
    given |= {"teachers": {"ref": lambda rows: others[rows]}}
    got = forward(model, model, batch, layout="padded", logits_mib=chunks * is_chunked, **given)
    want = compute_policy(
        all_logits(model, batch), batch.labels, kept=batch.kept, read_column=batch.tokens.column, **given
    )
    assert [*got.measures] == ["own", "gap"] and got.entropy is not None
    for ours, theirs in zip(got.list_tensors(), want.list_tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len({*got.gap.tolist()}) == len(LABELS)


@torch.no_grad()
@pytest.mark.parametrize(("measured", "size"), [(False, 4), (True, 2)])
def test_chunks_are_smaller_where_any_pass_of_the_run_has_measures(chunks, monkeypatch, measured, size):
    monkeypatch.setattr("modeling.head.BYTES_OF_MEASURES", 2**12)
    model, seen = make_model(), list[int]()
    measures = {"sum": Measure(lambda s, at: seen.append(len(s)) or s.sum(-1))}
    settings: dict[str, Any] = {"layout": "padded", "temperature": 1.0, "measures": measures}
    forward(model, model, some_batch(), logits_mib=chunks, measured=measured, **settings)
    assert seen[0] == size and sum(seen) == len(LABELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_head_in_chunks_are_those_of_whole_logits(chunks, dtype, bias):
    model = make_model(tie_word_embeddings=False).to(dtype)
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(64, dtype=dtype))
    batch = some_batch()
    parts = [model.lm_head.weight, *([model.lm_head.bias] if bias else []), model.model.norm.weight]
    slope = torch.linspace(0.5, 1.5, len(batch.labels))
    found, bound = [], 0.03 if dtype == torch.bfloat16 else 1e-5
    for mib in (0, chunks):
        logp = forward(model, model, batch, layout="padded", temperature=0.7, logits_mib=mib).logp
        found.append(torch.autograd.grad((slope * logp).sum(), parts))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == dtype and (ours - theirs).norm() < bound * theirs.norm()
    # a weight that is not trained gets none
    model.lm_head.requires_grad_(False)
    logp = forward(model, model, batch, layout="padded", temperature=0.7, logits_mib=chunks).logp
    [again] = torch.autograd.grad((slope * logp).sum(), parts[-1:])
    assert torch.equal(again, found[1][-1])


def test_a_head_that_is_followed_by_something_unknown_is_refused(chunks):
    told = (
        "trainer.logits_mib: the logits of a micro-batch do not fit, and a llama model's cannot be computed in chunks, "
        "because it changes its logits after the head in a way that is not known here: set trainer.logits_mib=0, which "
        "computes all at once, and lower trainer.micro_batch_tokens if memory runs out"
    )
    batch = some_batch()
    for run in (
        lambda engine: forward(engine, engine.inside, batch, layout="padded", temperature=1.0, logits_mib=chunks),
        lambda engine: compute_states(engine, engine.inside, batch, layout="padded"),
    ):
        doubled = Engine(make_model(), lambda logits: 2 * logits)
        with pytest.raises(UserError) as refused:
            run(doubled)
        assert str(refused.value) == told
        head = get_head(doubled.inside)
        assert not head.is_checked and head.compute is None and not head._forward_hooks
        run(Engine(doubled.inside))
        assert head.is_checked
    model = make_model()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match=r"because its head is no plain linear layer: set trainer\.logits_mib=0"):
        get_head(model)


def test_hidden_states_and_scores_are_of_the_chosen_positions():
    model, batch = make_model(), some_batch()
    inputs, at = {"input_ids": batch.input_ids[None]}, (torch.tensor([0, 0, 0]), torch.tensor([1, 4, 11]))
    hidden = model.model(**inputs).last_hidden_state[at]
    found = compute_hidden(model, model, inputs, at)
    torch.testing.assert_close(found, hidden)
    assert not found.requires_grad
    seen: list[slice] = []

    def score(logits: Tensor, rows: slice) -> Tensor:
        seen.append(rows)
        return torch.stack([logits[:, 3], logits.sum(-1)])

    scores = score_in_chunks(model, model, inputs, at, score, 2)
    logits = model.lm_head(hidden)
    torch.testing.assert_close(scores, torch.stack([logits[:, 3], logits.sum(-1)]))
    assert seen == [slice(0, 2), slice(2, 3)] and scores.requires_grad
    kept = KeptStates(model=model, hidden=found, weight=model.lm_head.weight, bias=torch.ones(64))
    torch.testing.assert_close(kept.compute_logits(slice(1, 3)), logits[1:] + 1)
    assert not kept.compute_logits(slice(0, 1)).requires_grad


def test_families_change_their_logits_after_the_head():
    logits = torch.tensor([[-3.0, 0.5, 2.0]])

    def finish(**config: Any) -> Tensor:
        text = SimpleNamespace(**config)
        model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
        return finish_logits(model, logits)

    capped = 2 * (logits / 2).tanh()
    assert finish() is logits and finish(final_logit_softcapping=None, logits_scaling=None) is logits
    torch.testing.assert_close(finish(final_logit_softcapping=2.0), capped)
    torch.testing.assert_close(finish(logits_scaling=4.0), logits / 4)
    torch.testing.assert_close(finish(final_logit_softcapping=2.0, logits_scaling=4.0), capped / 4)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(final_logit_softcapping=2.0))
    )
    kept = KeptStates(model=model, hidden=logits, weight=torch.eye(3))
    torch.testing.assert_close(kept.compute_logits(slice(0, 1)), capped)
    torch.testing.assert_close(normalize(logits), logits.log_softmax(-1))


class Holder(nn.Module):
    """A model of a head alone."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.head = head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_scoring_head_has_the_parameters_of_the_old_one(bias, training):
    old = nn.Linear(3, 5, bias=bias).train(training)
    model = Holder(old)
    use_scoring_head(model)
    ours = model.head
    assert type(ours) is ScoringHead and ours.weight is old.weight and ours.bias is old.bias
    assert (ours.in_features, ours.out_features, ours.training) == (3, 5, training)
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), old(x))
    with pytest.raises(KeyError), ours.computing(lambda hidden: hidden + 1):
        assert torch.equal(ours(x), x + 1)
        raise KeyError
    assert torch.equal(ours(x), old(x)), "it is as it was, also after an error"
    use_scoring_head(model)
    assert model.head is ours
    other = Holder(nn.Identity())
    use_scoring_head(other)
    assert type(other.head) is nn.Identity


class Replay:
    """Routes of a forward pass, which it keeps with what it is told of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[Any], bool]] = []
        self.is_open = False

    @contextmanager
    def over(self, routes: Tensor, *, counted: bool) -> Generator[None]:
        self.seen.append((routes.flatten().tolist(), counted))
        self.is_open = True
        yield
        self.is_open = False


@pytest.mark.parametrize("is_chunked", [False, True])
def test_routes_are_counted_in_passes_of_training_with_trained_tokens(chunks, is_chunked):
    replay, during, batch = Replay(), list[bool](), some_batch()
    engine = Engine(make_model(), lambda logits: during.append(replay.is_open) or logits)
    settings: dict[str, Any] = {"layout": "padded", "temperature": 1.0, "logits_mib": chunks * is_chunked}

    def run(batch: Batch, replay: Replay | None = replay) -> None:
        forward(engine, engine.inside, batch, replay=replay, **settings)

    run(batch)
    routed = replace(batch, routes=torch.arange(len(batch.input_ids), dtype=torch.int16)[:, None, None])
    run(routed, None)
    assert replay.seen == []
    run(routed)
    with torch.no_grad():
        run(routed)
    idle = replace(routed, at=batch.at[:0], labels=batch.labels[:0])
    if not is_chunked:
        run(idle)
    placed = [*range(12), *[-2] * 4]
    wanted = [(placed, True), (placed, False), *([] if is_chunked else [(placed, False)])]
    assert replay.seen == wanted and not replay.is_open
    assert during == [False, False] + [True] * len(wanted)


def test_values_are_those_of_every_label_at_the_position_before_the_token():
    scalar, batch = make_scalar(), some_batch()
    nn.init.normal_(scalar.score.weight)
    values = compute_values(scalar, batch, layout="padded", model=scalar)
    parts = batch.input_ids.split(batch.lengths.tolist())
    hidden = torch.cat([scalar.model(input_ids=ids[None]).last_hidden_state[0] for ids in parts])[batch.at]
    torch.testing.assert_close(values, scalar.score(hidden).T, rtol=1e-4, atol=1e-5)
    assert values.shape == (2, len(batch.labels)) and values.dtype == torch.float32
    assert not scalar.score._forward_hooks
    scores = compute_scores(scalar, scalar, batch, layout="padded")
    want = hidden.log_softmax(-1).gather(-1, batch.labels[:, None] % 64)[:, 0]
    torch.testing.assert_close(scores, want, rtol=1e-4, atol=1e-5)
    assert not scalar.score._forward_pre_hooks
    scalar.bfloat16()
    assert compute_values(scalar, batch, layout="padded", model=scalar).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_reaches_what_follows_the_head(chunks, dtype):
    """With a gradient of zero: ZeRO-3 compares the modules that a backward pass reaches."""
    seen: list[Tensor] = []

    def watch(logits: Tensor) -> Tensor:
        logits.register_hook(lambda grad: seen.append(grad))
        return logits

    engine, batch = Engine(make_model().to(dtype), watch), some_batch()
    policy = forward(engine, engine.inside, batch, layout="padded", temperature=1.0, logits_mib=chunks)
    policy.logp.sum().backward()
    [grad] = seen
    assert grad.shape == (1, 1, 64) and grad.dtype == dtype and not grad.any()
    with torch.no_grad():
        engine.change = lambda logits: logits
        frozen = forward(engine, engine.inside, batch, layout="padded", temperature=1.0, logits_mib=chunks)
    assert torch.equal(frozen.logp, policy.logp) and not frozen.logp.requires_grad


def test_stored_distributions_are_read_slot_by_slot():
    logits, labels = torch.randn(2, 8), torch.tensor([1, 2])
    columns = {
        "t_ids": torch.tensor([[3, 0, -1], [-1, -1, -1]], dtype=torch.int32),
        "t_logp": torch.tensor([[-0.5, -1.5, torch.nan], [torch.nan] * 3]),
    }
    seen: list[Any] = []
    measures = {"mine": Measure(lambda s, at: seen.append(at.stored("t")) or s.sum(-1))}
    given: dict[str, Any] = {"temperature": 1.0, "measures": measures, "read_column": columns.__getitem__}
    compute_policy(logits, labels, **given)
    [stored] = seen
    assert stored.columns.tolist() == [[3, 0, 0], [0, 0, 0]] and stored.columns.dtype == torch.int64
    assert stored.logp.tolist() == [[-0.5, -1.5, 0.0], [0.0] * 3]
    assert stored.live.tolist() == [[True, True, False], [False] * 3]
    with pytest.raises(UserError) as refused:
        compute_policy(logits, labels, allowed_tokens=AllowedTokens(allowed=(1, 2)), **given)
    assert str(refused.value) == "stored distributions are of all tokens: leave rollout.allowed_tokens out"
    compute_policy(logits, labels, allowed_tokens=AllowedTokens(banned=(0,)), **given)


def test_a_teacher_is_read_once_for_all_measures_of_a_chunk():
    asked: list[slice] = []

    def teach(rows: slice) -> Tensor:
        asked.append(rows)
        return torch.arange(8.0).expand(2, 8)

    measures = {
        name: Measure(lambda s, at: (s - at.teacher("ref")).sum(-1), teachers=("ref",)) for name in ("one", "two")
    }
    with torch.no_grad():
        given: dict[str, Any] = {"temperature": 0.5, "measures": measures, "teachers": {"ref": teach}}
        found = compute_policy(teach(slice(0, 2)), torch.tensor([1, 2]), **given)
    assert asked == [slice(0, 2)] * 2 and found.one.tolist() == found.two.tolist() == [0.0, 0.0]
    undeclared = {"mine": Measure(lambda s, at: at.teacher("other").sum(-1))}
    with pytest.raises(UserError) as refused:
        given |= {"measures": undeclared, "teachers": {"b": teach, "a": teach}}
        compute_policy(torch.zeros(2, 8), torch.tensor([1, 2]), **given)
    assert str(refused.value) == (
        "a measure reads at.teacher('other'), and those that it declares are: a, b; name it in Measure(..., "
        "teachers=('other',))"
    )


@pytest.mark.parametrize("kind", ["banned", "kept"])
def test_a_large_weight_of_an_entropy_has_a_finite_gradient(kind):
    """A token that cannot be chosen has a logit whose product with the weight must not overflow: 0 x inf is NaN."""
    labels = torch.tensor([1, 2, 3])
    given: dict[str, Any] = {"temperature": 0.7, "measures": ENTROPY}
    given |= {"allowed_tokens": AllowedTokens(banned=(0, 5))} if kind == "banned" else {}
    if kind == "kept":
        given["kept"] = KeptTokens.of(KeptSets.of_lists([[1], [2, 4], [0, 3, 5]]))
    slopes = []
    for weight in (1.0, 2.0**20):
        logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        entropy = compute_policy(logits, labels, **given).entropy
        assert entropy is not None
        slopes += torch.autograd.grad((weight * entropy).sum(), logits)
    assert slopes[0].any() and torch.equal(slopes[1], 2.0**20 * slopes[0])
