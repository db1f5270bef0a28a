"""How an algorithm is found, what is said of a loss that returns something else, and mixtures by source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algs import by_source as module_of_mixtures
from algs import compared as module_of_a_base
from algs import find_algorithm, is_algorithm, list_algorithms, load_algorithm, load_algorithm_class, load_nested
from algs import grpo as module_of_grpo
from algs import preference as module_of_pairs
from algs import reward_model as module_of_values
from algs.base import Algorithm, PolicyGradient
from algs.by_source import BySource
from algs.grpo import GRPO
from algs.objective import Objective, check_terms, compute_objective
from algs.reward_model import RewardModel
from algs.validate import check_per_token
from core.errors import RunStopped, UserError
from core.types.batch import TermTokens
from core.types.samples import Batch, Policy, Prompt, Sample, Tokens
from core.types.terms import Term
from unit_tests.helpers.examples import sample_of
from unit_tests.helpers.sentences import tell

NEITHER = "alg needs either a name (a module of algs/) or a file (a path), and not both"
MIXED: dict[str, Any] = {"by_source": {"a": {"name": "sft"}}}
MINE = "from algs.base import Algorithm, PolicyGradient\nfrom algs.grpo import GRPO\n\n\nclass Mine({base}):\n{body}\n"
LOSS = "    def loss(self, policy, tokens):\n        return -policy.logp, {}\n"


def write(folder: Path, base: str, body: str, name: str = "mine.py") -> str:
    file = folder / name
    file.write_text(MINE.format(base=base, body=body))
    return str(file)


def test_an_algorithm_is_found_by_name_by_file_or_by_its_sources(tmp_path):
    path = write(tmp_path, "GRPO", "    pass")
    for settings, module, in_package in (
        ({"name": "grpo"}, "algs.grpo", True),
        (MIXED, "algs.by_source", True),
        ({"name": "grpo"} | MIXED, "algs.grpo", True),
        ({"name": "", "file": ""} | MIXED, "algs.by_source", True),
        ({"file": path}, "mine_", False),
        ({"file": path} | MIXED, "mine_", False),
    ):
        spec, cls = find_algorithm(settings)
        assert spec.module.startswith(module) and spec.in_package == in_package
        assert issubclass(cls, Algorithm) and cls.__name__ in ("GRPO", "BySource", "Mine")
    spec, cls = find_algorithm({"name": "grpo"})
    assert (cls, spec.path) == (GRPO, module_of_grpo.__file__)
    loaded = load_algorithm(spec, {"clip_high": 0.5})
    assert isinstance(loaded, GRPO) and loaded.clip_high == 0.5
    nested = load_nested({"name": "grpo", "clip_high": 0.75}, "x")
    assert isinstance(nested, GRPO) and nested.clip_high == 0.75


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, NEITHER),
        ({"name": "", "file": None}, NEITHER),
        ({"name": "grpo", "file": "mine.py"}, NEITHER),
        ({"name": 3}, "alg.name=3 must be text"),
        ({"file": ["x.py"]}, "alg.file=['x.py'] must be text"),
        ({"file": "mine.txt"}, "alg.file=mine.txt is not a Python file: its name must end in .py"),
        ({"file": "/nowhere/mine.py"}, "alg.file: there is no file /nowhere/mine.py"),
    ],
)
def test_settings_that_name_no_algorithm_are_refused(settings, sentence):
    assert tell(lambda: find_algorithm(settings)) == sentence


def test_an_unknown_name_is_told_with_the_known_ones():
    assert tell(lambda: find_algorithm({"name": "grpoo"})) == (
        f"alg.name: there is no 'grpoo' in algs/ (did you mean 'grpo'?); it has {', '.join(list_algorithms())}, and a "
        "file of your own is named by its path (my_file.py)"
    )
    said = tell(lambda: load_nested({"name": "grpo", "clip_hgih": 0.1}, "by_source.a"))
    assert said.startswith("alg.by_source.a.clip_hgih is not a known key")


def test_a_module_is_an_algorithm_if_it_has_one_with_a_loss():
    for module, is_one in (
        (module_of_grpo, True),
        (module_of_values, True),
        (module_of_mixtures, True),
        (module_of_a_base, False),
        (module_of_pairs, False),
    ):
        assert is_algorithm(module) == is_one, module.__name__
    assert {"grpo", "reward_model"} <= {*list_algorithms()} and "preference" not in list_algorithms()


PREPARES = "    def prepare_groups(self, groups):\n        return groups\n"
ROWS = "    @property\n    def rows(self):\n        return 'pairs'\n"
KIND = "    @property\n    def model_kind(self):\n        return 'reward'\n"
ACCEPTS = "    def accept_group(self, group):\n        return True\n"


@pytest.mark.parametrize(
    ("base", "body", "name", "what"),
    [
        ("PolicyGradient", PREPARES, "prepare_groups", "a PolicyGradient"),
        ("PolicyGradient", ROWS, "rows", "a PolicyGradient"),
        ("PolicyGradient", KIND, "model_kind", "a PolicyGradient"),
        ("Algorithm", ACCEPTS, "accept_group", "no PolicyGradient"),
    ],
)
def test_what_would_never_be_read_is_refused(base, body, name, what, tmp_path):
    path = write(tmp_path, base, LOSS + body)
    assert tell(lambda: find_algorithm({"file": path})) == (
        f"{path}: Mine is {what}, and its {name} would never be read: delete it"
    )
    other = {"PolicyGradient": "Algorithm", "Algorithm": "PolicyGradient"}[base]
    spec, _ = find_algorithm({"file": write(tmp_path, other, LOSS + body, "other.py")})
    assert load_algorithm_class(spec).__name__ == "Mine"


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


TWO = Tokens(weight=tensor(0.5, 0.5))


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (3, "its loss must return (loss, metrics), a tensor and a dict, found 3"),
        ((1, {}, 2), "its loss must return (loss, metrics), a tensor and a dict, found (1, {}, 2)"),
        ([1, {}], "its loss must return (loss, metrics), a tensor and a dict, found [1, {}]"),
        ((1, [2]), "its loss must return (loss, metrics), a tensor and a dict, found (1, [2])"),
        ((1.5, {}), "the loss is float, expected a tensor with one value per token"),
        ((tensor(1, 2), {"x": 1}), "x is int, expected a tensor with one value per token"),
        (
            (tensor(1), {}),
            "the loss has shape [1], expected one value per token, [2]: return it unreduced, the framework weights "
            "and sums",
        ),
        (
            (tensor(1, 2), {"x": tensor(1, 2).sum()}),
            "x has shape [], expected one value per token, [2]: return it unreduced, the framework weights and sums",
        ),
        (
            (tensor(1, 2), {"x": torch.empty(2, device="meta")}),
            "x is on meta, expected cpu, where its input is",
        ),
        ((torch.ones(2, dtype=torch.int64), {}), "the loss has dtype torch.int64, expected the float32 of policy.logp"),
        (
            (tensor(1, 2), {"loss": tensor(1, 2)}),
            "its loss returns a metric 'loss', which the framework logs: rename it",
        ),
    ],
)
def test_a_loss_is_one_number_per_token(returned, sentence):
    assert tell(lambda: check_per_token(GRPO(), returned, TWO)) == f"GRPO: {sentence}"
    assert tell(lambda: Objective.of_loss(GRPO(), returned, TWO)) == f"GRPO: {sentence}"


def test_a_loss_that_is_one_number_per_token_is_returned():
    loss, told = tensor(1, 2), {"x": torch.ones(2, dtype=torch.int64)}
    assert check_per_token(GRPO(), (loss, told), TWO) == (loss, told)
    near = TWO.replace(totals={"t": tensor(1)[0]}, first={"t": tensor(1, 3)})
    found = Objective.of_loss(GRPO(), (loss, told), near)
    assert found.loss is loss and found.metrics["near_threshold"].tolist() == [1, 0] and found.metrics["x"] is told["x"]


class Sums(GRPO):
    """Returns a sum in place of a loss per token, in one of two terms."""

    on: str = ""

    @property
    def terms(self) -> tuple[Term, ...]:
        where: Any = self.on
        return (Term("one", self.loss), Term("two", lambda p, t: (p.logp.sum(), {}), on=where)) if self.on else ()

    def loss(self, policy: Policy, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return (-policy.logp if self.on else policy.logp.sum()), {}


def test_a_sum_is_refused_in_an_objective_too():
    shape = "Sums: the loss has shape [], expected one value per token, [1]: return it unreduced"
    one = Tokens(weight=tensor(1), rollout_logp=tensor(0), advantage=tensor(1))
    assert tell(lambda: Sums().objective(Policy(logp=tensor(-1)), one)).startswith(shape)
    empty = torch.zeros(1, dtype=torch.int64)
    names = ("input_ids", "position_ids", "segment_ids", "parents", "lengths", "at", "labels")
    inputs: Any = dict.fromkeys(names, empty)
    batch = Batch(**inputs, tokens=one, terms={name: TermTokens(at=empty, tokens=one) for name in ("one", "two")})
    for on in ("sampled", "observed"):
        assert tell(lambda on=on: compute_objective(Sums(on=on), Policy(logp=tensor(-1)), batch)).startswith(shape)


class RewardTerms(RewardModel):
    terms = property(lambda self: (Term("one", self.loss),))


def test_a_reward_model_has_no_terms():
    assert tell(lambda: check_terms(RewardTerms())) == (
        "RewardTerms: a value or reward model has no terms: leave `terms` out"
    )
    check_terms(RewardModel())


def of_source(source: str, reward: float | None, *ids: int) -> Sample:
    prompt = Prompt(id="p", messages=[], source=source)
    sample = sample_of([1, *ids], [False] + [True] * len(ids), reward=reward, prompt=prompt)
    return replace(sample, failure="timeout") if reward is None else sample


def advantages(alg: Algorithm, *groups: list[Sample]) -> list[list[float]]:
    found = alg.compute_advantages([*groups])
    return [[float(s.advantage[1]) for s in g if s.advantage is not None] for g in found]


GRPO_MATH: dict[str, Any] = {"name": "grpo", "scale_rewards": "mean", "dynamic_sampling": True}
BOTH = BySource(by_source={"math": GRPO_MATH, "chat": {"name": "sft"}, "code": {"name": "rloo"}}, coefs={"chat": 0.25})


def test_groups_have_the_advantages_of_their_source_in_their_order():
    math_groups = [[of_source("math", r, 5) for r in row] for row in ((1.0, 3.0), (2.0, 6.0))]
    code, chat = [of_source("code", r, 6) for r in (1.0, 4.0)], [of_source("chat", 9.0, 7)]
    got = advantages(BOTH, math_groups[0], code, chat, math_groups[1])
    assert got == [[-0.5, 0.5], [-3, 3], [0], [-0.5, 0.5]]
    assert not BOTH.accept_group([of_source("math", 1.0, 5)] * 2) and BOTH.accept_group(math_groups[0])
    assert BOTH.accept_group([of_source("code", 1.0, 5)] * 2) and BOTH.accept_group(chat)
    said = "alg.by_source has no algorithm for the source 'law': add it"
    for ask in (BOTH.accept_group, lambda group: BOTH.compute_advantages([group])):
        assert tell(lambda ask=ask: ask([of_source("law", 1.0, 5)]), RunStopped) == said


def test_each_source_has_the_terms_of_its_algorithm():
    def describe(alg: BySource) -> list[tuple[Any, ...]]:
        return [(t.name, t.on, t.norm, t.coef, t.sources) for t in alg.terms]

    assert describe(BOTH) == [
        ("math", "sampled", "token", 1.0, {"math"}),
        ("chat", "demonstrated", "token", 0.25, {"chat"}),
        ("code", "sampled", "sequence_sum", 1.0, {"code"}),
    ]
    sources: dict[str, Any] = {"a": {"name": "chord", "mu": 0.25, "loss_norm": "sequence"}, "b": {"name": "sft"}}
    assert describe(BySource(by_source=sources, coefs={"a": 2.0})) == [
        ("a.rl", "sampled", "sequence", 1.5, {"a"}),
        ("a.imitation", "demonstrated", "token", 0.5, {"a"}),
        ("b", "demonstrated", "token", 1.0, {"b"}),
    ]
    with pytest.raises(AssertionError, match="every token is in a term of its source"):
        BOTH.loss(Policy(logp=tensor(1)), TWO)


def test_a_source_is_corrected_by_its_own_settings():
    tokens = Tokens(weight=tensor(1), rollout_logp=tensor(-math.log(1.5)), prox_logp=tensor(0), advantage=tensor(2))
    policy = Policy(logp=tensor(0))
    of: dict[str, Callable[..., Any]] = {term.name: term.loss for term in BOTH.terms}
    assert of["math"](policy, tokens)[0].tolist() == pytest.approx([-3])
    assert of["chat"](Policy(logp=tensor(-2)), tokens) == (tensor(2), {})
    assert BOTH.objective(policy, tokens, of["math"])[0].tolist() == pytest.approx([-3]), "once"


MAY_NOT: list[tuple[dict[str, Any], str]] = [
    *(
        ({"by_source": {"a": {"name": "grpo"}}, **more}, f"{next(iter(more))} is a setting of each source's algorithm")
        for more in (
            {"loss_norm": "sequence"},
            {"entropy_coef": 0.1},
            {"correction": {"level": "none"}},
            {"kl": {"coef": 0.1}},
            {"overlong": {"mode": "filter"}},
            {"adaptive_entropy": {"target": 1.0}},
        )
    ),
    (
        {"by_source": {"a": {"name": "gkd", "teacher": "x"}, "b": {"name": "gkd", "teacher": "x"}}},
        "by_source.b: GKD has another divergence than a source after it: use one of them alone",
    ),
    (
        {"by_source": {"a": {"name": "gkd", "teacher": "x"}, "b": {"name": "gkd", "teacher": "y"}}},
        "by_source.a: GKD has another teacher than a source after it: use one of them alone",
    ),
]


@pytest.mark.parametrize(("settings", "words"), MAY_NOT)
def test_what_sources_cannot_share_is_refused(settings, words):
    with pytest.raises(ValueError, match="Value error") as refused:
        BySource(**settings)
    assert words in str(refused.value)


def test_what_sources_can_share_is_allowed():
    penalty = {"mode": "penalty", "buffer": 2, "max_tokens": 8}
    exact = {"coef": 0.1}
    for sources in (
        {"a": {"name": "grpo", "overlong": penalty}, "b": {"name": "grpo", "overlong": {"mode": "filter"}}},
        {"a": {"name": "grpo", "kl": exact}, "b": {"name": "rloo", "kl": exact}, "c": {"name": "grpo"}},
        {"a": {"name": "gkd", "teacher": "x"}, "b": {"name": "erc"}, "c": {"name": "distill"}},
    ):
        mixture = BySource(by_source=sources)
        assert [*mixture.algorithms] == [*sources]
        assert all(isinstance(alg, Algorithm) for alg in mixture.algorithms.values())
    assert isinstance(BOTH, PolicyGradient) and not isinstance(BOTH.algorithms["chat"], PolicyGradient)
    with pytest.raises(UserError, match="only modules of algs/ may be mixed"):
        BySource(by_source={"a": {"file": module_of_grpo.__file__}})
