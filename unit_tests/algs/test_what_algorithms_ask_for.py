"""What each algorithm asks for: rows, columns, teachers, measures, terms, and which samples stay together."""

from __future__ import annotations

from typing import Any

import pytest

from algs import is_algorithm, list_algorithms, load_algorithm_class
from algs.base import Algorithm, PolicyGradient, TurnCredit
from algs.teachers import Teacher
from core.loading import resolve
from core.types.terms import Term
from unit_tests.helpers.variants import NEEDED, OFF

Asked = dict[str, Any]
PLAIN: Asked = {
    "rows": "conversations",
    "model_kind": "policy",
    "loss_norm": "token",
    "whole_groups": False,
    "whole_episodes": False,
    "required_columns": set(),
    "needs_entropy": False,
    "measures": set(),
    "teachers": {},
    "terms": [],
    "value_lr": None,
    "trains_policy": True,
    "has_state": False,
    "needs_siblings": False,
    "anchored_on_rollout": False,
    "not_on_policy": False,
    "not_outwards": False,
    "shares_advantage": False,
    "corrected_by": "token",
}
"""What an algorithm asks for that overrides nothing."""


def describe_teacher(teacher: Teacher) -> tuple[Any, ...]:
    """Model, rate of the average, sources, and whether it has a prompt of its own."""
    return teacher.model, teacher.ema, (*teacher.sources,), teacher.prompt is not None


def describe_term(term: Term) -> tuple[Any, ...]:
    """Name, tokens, norm, coefficient, sources, and whether others are in the denominator."""
    on = term.on if isinstance(term.on, str) else "chosen"
    return term.name, on, term.norm, term.coef, term.sources, term.among is not None


def list_asked(alg: Algorithm) -> Asked:
    """Return what an algorithm asks for, where it is not the plain."""
    there = {*dir(type(alg)), *type(alg).model_fields}
    found: Asked = {name: getattr(alg, name) for name in PLAIN if name in there}
    found["required_columns"] = {*found["required_columns"]}
    found["measures"] = {*found["measures"]}
    found["teachers"] = {name: describe_teacher(teacher) for name, teacher in alg.teachers.items()}
    found["terms"] = [describe_term(term) for term in alg.terms]
    if isinstance(alg, PolicyGradient):
        found["corrected_by"] = alg.correction.level
        found["not_on_policy"], found["not_outwards"] = bool(alg.not_on_policy), bool(alg.not_outwards)
    assert ("shares_advantage" in found) == isinstance(alg, TurnCredit)
    return {name: value for name, value in found.items() if value != PLAIN[name]}


REF: Asked = {"required_columns": {"ref_logp"}, "teachers": {"ref_logp": ("start", None, (), False)}}
PAIRS: Asked = {"rows": "pairs", "loss_norm": "prompt", "whole_groups": True}
GROUPS: Asked = {"needs_siblings": True}
ENGINE: Asked = {"anchored_on_rollout": True, "corrected_by": "none"}
BY_SEQUENCE: Asked = {"loss_norm": "sequence", "whole_episodes": True, "shares_advantage": True}
NOT: Asked = {"not_on_policy": True}
GRADED: Asked = {"required_columns": {"teacher_logp"}}
SOMEWHERE = ("somewhere", None, (), False)
ASKED: dict[str, Asked] = {
    "aot": PAIRS | REF,
    "bco": REF | {"rows": "unpaired", "loss_norm": "sequence", "has_state": True},
    "by_source": GROUPS | {"terms": [("", "sampled", "token", 1.0, {""}, False)]},
    "chord": GROUPS
    | {
        "terms": [
            ("rl", "sampled", None, 0.9, None, False),
            ("imitation", "demonstrated", "token", 0.1, None, False),
        ]
    },
    "cispo": GROUPS,
    "clip_cov": GROUPS | NOT,
    "distill": {"measures": {"distance"}},
    "dpo": PAIRS | REF,
    "dpo_nll": PAIRS
    | REF
    | {"terms": [("pair", "sampled", None, 1.0, None, False), ("nll", "chosen", "token", 1.0, None, False)]},
    "dppo": GROUPS | ENGINE | {"loss_norm": "constant"},
    "dro": GROUPS,
    "echo": GROUPS
    | {"terms": [("rl", "sampled", None, 1.0, None, False), ("observed", "observed", "token", 0.1, None, False)]},
    "erc": GROUPS | {"measures": {"spread", "spread_before"}, "required_columns": {"prox.spread_before"}},
    "gdpo": GROUPS,
    "gkd": {"measures": {"divergence"}, "teachers": {"teacher": SOMEWHERE}, "corrected_by": "none"},
    "gmpo": GROUPS | BY_SEQUENCE,
    "gpg": GROUPS,
    "grpo": GROUPS,
    "gspo": GROUPS | BY_SEQUENCE,
    "ipo_rl": GROUPS | ENGINE,
    "kl_cov": GROUPS | {"not_outwards": True},
    "kto": REF | {"rows": "unpaired", "loss_norm": "sequence", "required_columns": {"ref_logp", "prox_logp"}},
    "luffy": GROUPS
    | {
        "terms": [
            ("on_policy", "sampled", None, 1.0, None, True),
            ("off_policy", "demonstrated", None, 1.0, None, True),
        ]
    },
    "m2po": GROUPS | {"required_columns": {"prox_logp"}},
    "minillm": ENGINE
    | {
        "measures": {"teacher_kl"},
        "teachers": {"teacher_logp": SOMEWHERE},
        "required_columns": {"teacher_logp", "prox_logp"},
    },
    "offline_dro": REF | {"rows": "scored", "loss_norm": "sequence", "whole_groups": True},
    "opd": ENGINE | GRADED | {"teachers": {"teacher_logp": SOMEWHERE}},
    "opo": GROUPS,
    "opsd": ENGINE | GRADED | {"teachers": {"teacher_logp": ("live", None, (), True)}},
    "orpo": PAIRS,
    "otb": GROUPS | {"measures": {"collision"}, "required_columns": {"prox_logp", "prox.collision"}},
    "p3o": GROUPS | ENGINE,
    "p4o": GROUPS | ENGINE,
    "passk": GROUPS,
    "positive_nll": GROUPS
    | {"terms": [("rl", "sampled", None, 1.0, None, False), ("positives", "chosen", "token", 0.1, None, False)]},
    "ppo": {"required_columns": {"values"}, "value_lr": 1e-5},
    "qae": GROUPS,
    "rae": {"has_state": True},
    "raft": NOT,
    "reinforce_pp": {},
    "reward_model": PAIRS | {"model_kind": "reward"},
    "rloo": GROUPS | {"loss_norm": "sequence_sum"},
    "sapo": GROUPS | {"loss_norm": "sequence"},
    "scalerl": GROUPS | ENGINE | {"loss_norm": "prompt"},
    "sdpo": GROUPS | GRADED | {"loss_norm": "sequence", "teachers": {"teacher_logp": ("start", 0.05, (), True)}},
    "sft": {},
    "tilted": GROUPS | NOT,
    "top_entropy": GROUPS | NOT | {"needs_entropy": True},
    "topr": GROUPS | ENGINE | {"loss_norm": "sequence_sum", "whole_episodes": True},
    "vespo": GROUPS | {"whole_episodes": True},
    "wpo": PAIRS | REF | {"measures": {"collision"}},
}


def make(name: str, settings: Asked) -> Algorithm:
    cls = load_algorithm_class(resolve(name, "algs", offers=is_algorithm, key="alg.name"))
    return cls(**NEEDED.get(name, {}) | settings)


@pytest.mark.parametrize("name", ASKED)
def test_an_algorithm_asks_for_this_as_it_comes(name: str):
    assert list_asked(make(name, {})) == ASKED[name]


def test_the_table_has_every_algorithm():
    assert {*ASKED} == {*list_algorithms()}


KL: Asked = {"kl": {"coef": 0.1}}
IN_REWARD: Asked = {"kl": {"coef": 0.1, "place": "reward"}}
EXACT: Asked = {"kl": {"coef": 0.1, "estimator": "full"}}
BOTH: Asked = {"required_columns": {"ref_logp", "prox_logp"}}


def with_ref(asked: Asked) -> Asked:
    """Return what is asked for, and a reference beside it."""
    return asked | {
        "required_columns": asked.get("required_columns", set[str]()) | {"ref_logp"},
        "teachers": asked.get("teachers", {}) | REF["teachers"],
    }


def with_kl(asked: Asked) -> Asked:
    """Return what is asked for, and the exact KL from the reference beside it."""
    return with_ref(asked) | {"measures": asked.get("measures", set[str]()) | {"kl"}}


CASES: list[tuple[str, Asked, Asked]] = [
    ("grpo", KL, GROUPS | REF),
    ("grpo", IN_REWARD, GROUPS | REF | BOTH),
    ("grpo", EXACT, with_kl(GROUPS)),
    ("grpo", {"kl": {"coef": 0.1, "estimator": "full_forward"}}, with_kl(GROUPS)),
    ("grpo", {"kl": {"estimator": "full"}}, GROUPS),
    ("grpo", {"kl": {"coef": 0.1, "target": 0.2}}, GROUPS | REF | {"has_state": True}),
    ("grpo", {"kl": {"coef": 0.1, "ema": 0.25}}, GROUPS | REF | {"teachers": {"ref_logp": ("start", 0.25, (), False)}}),
    ("grpo", {"entropy_coef": 0.01}, GROUPS | {"needs_entropy": True}),
    ("grpo", {"adaptive_entropy": {"target": 0.5}}, GROUPS | {"needs_entropy": True, "has_state": True}),
    ("grpo", {"correction": {"level": "sequence"}}, GROUPS | {"whole_episodes": True, "corrected_by": "sequence"}),
    ("grpo", {"correction": {"level": "geometric"}}, GROUPS | {"whole_episodes": True, "corrected_by": "geometric"}),
    ("grpo", {"correction": {"max_drift": 0.5}}, GROUPS | {"whole_episodes": True}),
    ("cispo", {"anchor": "rollout", **OFF}, GROUPS | ENGINE),
    ("dpo", {"reference_free": True}, PAIRS),
    ("dro", {"anchor": "ref"}, GROUPS | REF | NOT),
    ("dro", {"anchor": "rollout", **OFF}, GROUPS | ENGINE),
    (
        "dro",
        {"level": "sequence", "loss_norm": "sequence_sum"},
        GROUPS | {"loss_norm": "sequence_sum", "whole_episodes": True},
    ),
    ("dro", {"correction": {"max_drift": 0.5}}, GROUPS | {"whole_episodes": True}),
    ("erc", EXACT, with_kl(ASKED["erc"])),
    ("gkd", EXACT, with_kl(ASKED["gkd"])),
    ("gspo", {"form": "token"}, GROUPS | {"loss_norm": "sequence", "whole_episodes": True}),
    ("gspo", {"ratio": "product"}, GROUPS | BY_SEQUENCE | NOT),
    ("m2po", KL, GROUPS | REF | BOTH),
    ("minillm", EXACT, with_kl(ASKED["minillm"])),
    ("opd", KL, with_ref(ASKED["opd"])),
    ("opd", {"ratio": "none"}, {k: v for k, v in ASKED["opd"].items() if k != "anchored_on_rollout"}),
    (
        "opd",
        {"teacher": {"a": "x", "b": "y"}},
        ASKED["opd"]
        | {"teachers": {"teacher of a": ("x", None, ("a",), False), "teacher of b": ("y", None, ("b",), False)}},
    ),
    ("opsd", KL, with_ref(ASKED["opsd"])),
    ("opsd", {"teacher": "start"}, ASKED["opsd"] | {"teachers": {"teacher_logp": ("start", None, (), True)}}),
    ("otb", EXACT, with_kl(ASKED["otb"])),
    ("ppo", KL, with_ref(ASKED["ppo"])),
    ("ppo", {"critic_warmup": 1, "critic_lr": 0.5}, ASKED["ppo"] | {"trains_policy": False, "value_lr": 0.5}),
    ("reinforce_pp", {"baseline": True}, GROUPS),
    ("sdpo", KL | {"ema": 0.5}, with_ref(ASKED["sdpo"] | {"teachers": {"teacher_logp": ("start", 0.5, (), True)}})),
    ("vespo", {"anchor": "rollout", **OFF}, ASKED["vespo"] | ENGINE),
    ("vespo", {"rollout_cap": 2.0, **OFF}, ASKED["vespo"] | ENGINE),
    ("wpo", {"reference_free": True}, PAIRS | {"measures": {"collision"}}),
]


@pytest.mark.parametrize(("name", "settings", "asked"), CASES)
def test_settings_change_what_an_algorithm_asks_for(name: str, settings: Asked, asked: Asked):
    assert list_asked(make(name, settings)) == asked


def test_teachers_of_several_data_sets_fill_one_column():
    teachers = make("opd", {"teacher": {"a": "x", "b": "y"}}).teachers
    assert [teacher.column for teacher in teachers.values()] == ["teacher_logp"] * 2
    assert [teacher.column for teacher in make("opd", {"teacher": "x"}).teachers.values()] == [""]


@pytest.mark.parametrize("teacher", ["", {}, {"a": "x", "b": ""}])
def test_a_teacher_without_a_path_is_refused(teacher: Any):
    with pytest.raises(ValueError, match="name the path of a model, or a path for each data set"):
        make("opd", {"teacher": teacher})


def test_measures_read_the_teachers_that_they_name():
    for name, measure, teachers in (
        ("gkd", "divergence", ("teacher",)),
        ("minillm", "teacher_kl", ("teacher_logp",)),
        ("otb", "collision", ()),
        ("erc", "spread", ()),
    ):
        assert make(name, {}).measures[measure].teachers == teachers
    assert make("grpo", EXACT).measures["kl"].teachers == ("ref_logp",)
