"""Columns of teachers: prompts of their own, data sets of their own, and samples that have none."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import main_rl
import main_sl
from algs.base import PolicyGradient
from algs.opd import OPD
from algs.opsd import OPSD
from algs.teachers import Teacher, check_teachers
from algs.terms import KL
from analysis.capture.losses import NamedLoss, credit_groups
from configs.schema import RLConfig
from core.cluster.workers import Local
from core.errors import RunStopped, UserError
from core.types.images import EncodedImage, PlacedImage
from core.types.kept_sets import KeptSets
from core.types.samples import Group, Prompt, Sample
from data_feeds.chat.tokenizer import ChatTokenizer
from data_feeds.packing.batches import plan_update
from data_feeds.packing.splice import align, splice
from driver.checks.explain import estimate_memory
from driver.checks.terms import check_given
from driver.load_recipe import load_recipe
from driver.rl.teachers import Reader, check_teacher_sources, move_teachers, score_groups
from rewards.weights import plan_rewards
from unit_tests.helpers.examples import run_here, sample_of
from unit_tests.helpers.golden2 import GOLDEN2
from unit_tests.helpers.local_trainers import TEMPERATURE, trainer_of
from unit_tests.helpers.runs import LUCK, file_of, folder_of, metrics_of, numbers_of

pytestmark = pytest.mark.usefixtures("one_thread")
SPLICE = GOLDEN2["splice"]


def toy_logp(ids) -> list[float]:
    """The oracle's model: the log-probability of each id given those before it; 0 for the first."""
    found, h = [0.0], 0.0
    for before, own in pairwise(ids):
        h = math.sin(1.7 * h + 0.61 * before + 0.3)
        logits = torch.tensor([1.5 * math.sin(2.3 * h + 0.9 * v + 0.1 * v * h) for v in range(12)], dtype=torch.float64)
        found.append(float(logits.log_softmax(0)[own]))
    return found


def test_images_of_a_teacher_that_reads_text_are_refused_at_the_start(recipe):
    cfg = load_recipe(RLConfig, recipe({}), []).cfg
    image = {"type": "image", "image": EncodedImage(b"", width=1, height=1, hash="")}
    seen = Prompt(id="7", messages=[{"role": "user", "content": "?", "parts": [cast(Any, image)]}])
    prompts = cast(Any, SimpleNamespace(all=lambda: [seen]))
    check_given(cfg, OPD(teacher="t"), prompts, rewards := plan_rewards(cfg.reward))
    with pytest.raises(UserError, match=r"images \(as in 7\), and the teacher of OPSD reads text only"):
        check_given(cfg, OPSD(), prompts, rewards)


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (SPLICE["hint"] + SPLICE["ids"][:6], "hint"),
        (SPLICE["reprompt"], "reprompt"),
    ],
)
def test_a_teachers_row_and_its_column_are_the_oracles(prompt, name):
    sample = sample_of(SPLICE["ids"], [bool(m) for m in SPLICE["action_mask"]])
    row = splice(sample, prompt)
    assert row.token_ids.tolist() == SPLICE[f"teacher_ids_{name}"]
    assert np.flatnonzero(row.loss_mask).tolist() == SPLICE[f"teacher_positions_{name}"]
    scored = np.where(row.loss_mask, toy_logp(row.token_ids.tolist()), 0.0).astype(np.float32)
    column = align(sample, replace(row, columns={"teacher": scored}), "teacher")
    assert column[SPLICE["trained_positions"]] == pytest.approx(SPLICE[f"teacher_logp_{name}"], abs=1e-6)
    assert not column[~sample.loss_mask].any()


def test_a_teachers_row_has_the_sets_that_the_policy_chose_from():
    kept = KeptSets.of_lists([[], [1, 2], [2, 3, 4], [], [5, 6]])
    excluded = [False, False, True, False, False]
    mask = [False, True, True, False, True]
    sample = sample_of([9, 1, 3, 8, 6], mask, kept=kept, excluded=excluded)
    row = splice(sample, [7, 7, 7])
    assert row.token_ids.tolist() == [7, 7, 7, 1, 3, 8, 6]
    assert row.kept == KeptSets.of_lists([[], [], [], [1, 2], [], [], [5, 6]])


def test_excluded_tokens_stay_so_in_a_teachers_row():
    sample = sample_of([5, 6, 7, 8], [False, True, True, True], excluded=[False, False, True, False])
    assert splice(sample, [1, 2, 3]).loss_mask.tolist() == [False, False, False, True, False, True]
    with pytest.raises(ValueError, match="no tokens"):
        splice(sample, [])


class Told(PolicyGradient):
    """A column of its own, from a model under another prompt."""

    model: str = "live"

    @property
    def required_columns(self):
        return frozenset({"told"})

    @property
    def teachers(self):
        return {"told": Teacher(self.model, prompt=hinted)}


def reader_of(tiny_path: str, room: int = 200) -> Reader:
    model = SimpleNamespace(path=tiny_path, trust_remote_code=False)
    cfg: Any = SimpleNamespace(model=model, trainer=SimpleNamespace(micro_batch_tokens=room))

    def plan(groups: list[Group]):
        return plan_update(groups, "token", room)

    return Reader(cfg=cfg, tokenizer=ChatTokenizer(tiny_path, "chat"), plan=plan, plan_rows=plan)


def asked(reader: Reader, question: str, reply: list[int], mask: list[bool], **more: Any) -> Sample:
    """A sample of a question, rendered as a run does, with these ids after it."""
    prompt = Prompt(id=question, messages=[{"role": "user", "content": question}], source=more.pop("source", ""))
    ids = reader.tokenizer.render(prompt.messages)
    return sample_of([*ids, *reply], [*[False] * len(ids), *mask], prompt=prompt, **more)


def score(trainer, groups: list[Group], teachers: dict[str, Teacher], reader: Reader) -> list[Group]:
    return asyncio.run(score_groups(Local(trainer), groups, frozenset({"told"}), teachers=teachers, reader=reader))


def hinted(sample: Sample, group: Group):
    """Return another prompt, longer than the sample's."""
    return [{"role": "user", "content": f"{sample.prompt.messages[0]['content']}, it is {len(group)}"}]


TURNS = [9, 8, 7, 2, 30, 31, 12, 13, 2], [True] * 4 + [False] * 2 + [True] * 3


@pytest.mark.parametrize("model", ["live", "start"])
def test_a_column_is_the_models_own_under_the_teachers_prompt(tiny_path, model):
    """Two turns, with a message of an environment between them; other samples in the batch change nothing."""
    reader = reader_of(tiny_path)
    groups = [
        [asked(reader, "1+2", *TURNS), asked(reader, "1+2", [5, 6], [True, True])],
        [asked(reader, "34+5", *TURNS)],
    ]
    alg = Told(model=model)
    trainer = trainer_of(tiny_path, alg)
    scored = [s for g in score(trainer, groups, alg.teachers, reader) for s in g]
    for sample, (group, given) in zip(scored, [(g, s) for g in groups for s in g], strict=True):
        prompt = reader.tokenizer.render(hinted(given, group))
        first = int(given.action_mask.argmax())
        ids = torch.tensor([[*prompt, *given.token_ids[first:].tolist()]])
        with torch.no_grad():
            logp = (trainer.model(input_ids=ids).logits[0] / TEMPERATURE).log_softmax(-1)
        plain = [float(logp[t - 1, ids[0, t]]) for t in range(len(prompt), ids.shape[1])]
        want = [0.0] * first + [x if yes else 0.0 for x, yes in zip(plain, given.loss_mask[first:], strict=True)]
        assert sample.columns["told"] == pytest.approx(want, abs=1e-5)
        assert sample.counts == {"without_teacher": 0.0} and sample.excluded is None


def test_a_sample_without_a_teacher_is_neither_trained_on_nor_counted(tiny_path):
    reader = reader_of(tiny_path)
    samples = [asked(reader, q, [9, 8], [True, True]) for q in ("1+2", "2+2", "3+2")]

    def some(sample: Sample, group: Group):
        return None if sample.prompt.id == "2+2" else hinted(sample, group)

    teachers = {"told": Teacher("live", prompt=some)}
    [[one, none, two]] = score(Scripted(), [samples], teachers, reader)
    assert [s.n_trained for s in (one, none, two)] == [2, 0, 2]
    assert "told" not in none.columns and none.counts == {"without_teacher": 1.0}
    assert [plan_update([[one, none, two]], "token", 100).weights] == [[0.25, 0.25]]


def test_a_teacher_reads_neither_columns_nor_advantages(tiny_path):
    reader = reader_of(tiny_path)
    scored = asked(reader, "1+2", [9, 8], [True, True], source="a").with_advantage(1.0)
    row = reader.write_row(Teacher("start", sources=frozenset({"a"})), scored, [scored])
    assert row is not None and (row.columns, row.advantage) == ({}, None)
    assert row.token_ids.tolist() == scored.token_ids.tolist()


def test_no_compared_loss_trains_on_a_sample_without_its_column(tiny_path):
    """The exclusions of the run's own algorithm are taken back, but not this one."""
    columns = {"teacher_logp": [0.0, -1.0, -2.0]}
    samples = [
        sample_of([5, 6, 7], [False, True, True], columns=columns, excluded=[True] * 3),
        sample_of([5, 6, 7], [False, True, True], excluded=[True] * 3),
    ]
    loss = NamedLoss(name="opsd", alg=OPSD())
    [[one, none]] = credit_groups(loss, [samples], stale=False)
    assert [one.n_trained, none.n_trained] == [2, 0]


def test_a_row_that_is_too_long_has_no_teacher_and_is_not_cut(tiny_path):
    reader = reader_of(tiny_path)
    short, long = asked(reader, "1+2", [9, 8], [True, True]), asked(reader, "1+2", [9] * 12, [True] * 12)
    room = len(splice(long, reader.tokenizer.render(hinted(long, []))).token_ids) - 1
    teachers = {"told": Teacher("live", prompt=lambda s, g: hinted(s, []))}
    [[one, none]] = score(Scripted(), [[short, long]], teachers, reader_of(tiny_path, room))
    assert [one.n_trained, none.n_trained] == [2, 0]
    [[one, other]] = score(Scripted(), [[short, long]], teachers, reader_of(tiny_path, room + 1))
    assert [one.n_trained, other.n_trained] == [2, 12]


def test_a_step_without_any_teacher_stops(tiny_path):
    reader = reader_of(tiny_path)
    teachers = {"told": Teacher("live", prompt=lambda s, g: None)}
    with pytest.raises(RunStopped, match=r"no sample .* has a teacher for the column told.*accept_group"):
        score(Scripted(), [[asked(reader, "1+2", [9], [True])]], teachers, reader)


def test_a_prompt_that_would_replace_other_messages_stops(tiny_path):
    reader = reader_of(tiny_path)
    sample = asked(reader, "1+2", [9], [True])
    agents = replace(sample, prompt=replace(sample.prompt, messages=[{"role": "user", "content": "3"}]))
    teachers = {"told": Teacher("live", prompt=hinted)}
    with pytest.raises(RunStopped, match="begins with other messages than its prompt"):
        score(Scripted(), [[agents]], teachers, reader)


def test_a_teacher_with_a_prompt_of_its_own_reads_text_only(tiny_path):
    reader = reader_of(tiny_path)
    sample = asked(reader, "1+2", [9], [True])
    image = EncodedImage(b"", width=1, height=1, hash="")
    drawn: Any = {"role": "user", "content": "", "parts": [{"type": "image", "image": image}]}
    for given, prompt, sentence in (
        (
            replace(sample, images=(PlacedImage(image=image, begin=0, end=1),)),
            hinted,
            "the sample of 1+2 has images, and a teacher with a prompt of its own reads text: let its prompt return "
            "None for such samples",
        ),
        (sample, lambda s, g: [drawn], "the teacher's prompt for 1+2 holds an image: give it text only"),
    ):
        with pytest.raises(RunStopped) as stopped:
            score(Scripted(), [[given]], {"told": Teacher("live", prompt=prompt)}, reader)
        assert str(stopped.value) == sentence


class Scripted:
    """A trainer that says of every token which teacher scored it, and in rows of which length."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def compute_columns(self, batches, columns):
        [name] = columns
        self.asked.append(name)
        return [{name: np.full(len(b.labels), float(len(self.asked)), dtype=np.float32)} for b in batches]


def test_every_data_set_is_scored_by_its_own_teacher(tiny_path):
    reader = reader_of(tiny_path)
    sources = ["math", "code", "math", "chat"]
    groups = [[asked(reader, f"{n}+1", [9, 8], [True, True], source=s)] for n, s in enumerate(sources)]
    teachers = {s: Teacher(f"models/{s}", column="told", sources=(s,)) for s in ("math", "code")}
    trainer = Scripted()
    scored = [s for g in score(trainer, groups, teachers, reader) for s in g]
    assert trainer.asked == ["code", "math"]
    assert [float(s.columns["told"].max()) for s in scored[:3]] == [2, 1, 2]
    assert scored[3].n_trained == 0 and "told" not in scored[3].columns


def test_a_teacher_of_a_data_set_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"for the data set 'maths', and data.train has 'code', 'math'"):
        check_teacher_sources({"one": Teacher("m", sources=("maths",))}, {"math", "code"})


@pytest.mark.parametrize(
    ("teachers", "said"),
    [
        ({"a": Teacher("m", column="c"), "b": Teacher("n", column="c")}, "give each its own sources"),
        (
            {"a": Teacher("m", column="c", sources=("s", "t")), "b": Teacher("n", column="c", sources=("t",))},
            "give each its own sources",
        ),
        ({"other": Teacher("m")}, "fills other, which required_columns does not name"),
    ],
)
def test_teachers_whose_column_is_not_clear_are_refused(teachers, said):
    with pytest.raises(UserError, match=said):
        check_teachers(teachers, {"c"})


def test_a_run_moves_its_teachers_after_the_step_that_is_due():
    seen: list[dict[str, float]] = []
    teachers = {"a": Teacher("start", ema=0.1, reset_every=3), "b": Teacher("m")}
    alg = cast(Any, SimpleNamespace(teachers=teachers, state={}))
    trainers = Local(cast(Any, SimpleNamespace(move_teachers=seen.append)))
    for step in range(1, 5):
        asyncio.run(move_teachers(trainers, alg, step))
    assert seen == [{"a": 0.1}, {"a": 0.1}, {"a": 1.0}, {"a": 0.1}]


OWN = {"alg": {"name": "opsd"}, "steps": 2, "trainer.lr": 1e-2}


def test_a_run_learns_from_the_answer_in_its_own_prompt(recipe, tmp_path):
    assert run_here(main_rl, "--config", recipe(OWN)) == (0, "")
    first, second = metrics_of(folder_of(tmp_path))
    assert first["rollout/counts/without_teacher"] == 0 and first["train/teacher_kl"] != 0
    assert second["train/teacher_kl"] != first["train/teacher_kl"]


def lucky(tmp_path) -> dict[str, Any]:
    """Rewards by chance, so that every step moves the policy."""
    return {"reward": {"function": file_of(tmp_path / "luck.py", LUCK)}, "trainer.lr": 1e-2}


def test_a_run_resets_its_reference(recipe, tmp_path):
    kl = {"alg": {"name": "grpo", "kl": {"coef": 0.1, "reset_every": 2}}, "steps": 5, **lucky(tmp_path)}
    assert run_here(main_rl, "--config", recipe(kl)) == (0, "")
    assert [row["train/kl_ref"] == 0 for row in metrics_of(folder_of(tmp_path))] == [True, False, True, False, True]


ON_SPIKE = """
from algs.grpo import GRPO
from algs.teachers import Teacher

class OnSpike(GRPO):
    @property
    def teachers(self):
        return {"ref_logp": Teacher("start", when=lambda state: state["kl"] > 0)}

    def initial_state(self):
        return {"kl": 0.0}

    def next_state(self, step):
        return {"kl": step.mean("kl_ref")}
"""


def test_a_run_resets_its_reference_when_the_state_of_the_step_says_so(recipe, tmp_path):
    alg = {"alg": {"file": file_of(tmp_path / "on_spike.py", ON_SPIKE), "kl": {"coef": 0.1}}}
    assert run_here(main_rl, "--config", recipe(alg | {"steps": 4} | lucky(tmp_path))) == (0, "")
    assert [row["train/kl_ref"] == 0 for row in metrics_of(folder_of(tmp_path))] == [True, False, True, False]


def test_a_run_resumes_with_its_average(recipe, tmp_path):
    """What it compares with depends on all steps before."""
    moving = {"alg": {"name": "grpo", "kl": {"coef": 0.1, "ema": 0.3}}, "checkpoint.every": 2, **lucky(tmp_path)}
    path = recipe(moving | {"steps": 4})
    assert run_here(main_rl, "--config", path, "name=whole") == (0, "")
    at = folder_of(tmp_path, "whole") / "checkpoints" / "step_00002"
    assert run_here(main_rl, "--config", path, "name=resumed", f"resume={at}") == (0, "")
    want, got = (numbers_of(folder_of(tmp_path, name)) for name in ("whole", "resumed"))
    assert got == want[2:] and float.fromhex(want[3]["train/kl_ref"]) > 0


def test_a_supervised_run_refuses_a_teacher_that_reads_something_else(recipe, tmp_path):
    text = """
from algs.sft import SFT
from algs.teachers import Teacher

class Averaged(SFT):
    required_columns = property(lambda self: frozenset({"ref_logp"}))
    teachers = property(lambda self: {"ref_logp": Teacher("start", ema=0.1)})

    def loss(self, policy, tokens):
        return (policy.logp - tokens.ref_logp).square(), {}
"""
    path = recipe({"alg": {"file": file_of(tmp_path / "averaged.py", text)}}, kind="sl")
    code, said = run_here(main_sl, "--config", path)
    assert code == 2 and "run it with main_rl.py" in said


def test_explain_counts_a_reference_that_moves(recipe, capsys):
    sizes = []
    for kl in ({"coef": 0.1}, {"coef": 0.1, "ema": 0.1}):
        path = recipe({"alg": {"name": "grpo", "kl": kl}, "model.dtype": "bfloat16", "name": "sized"})
        sizes.append(estimate_memory(load_recipe(RLConfig, path, [])).frozen)
    assert sizes[1] == 2 * sizes[0], "float32 instead of bfloat16"


def test_explain_counts_every_model_once(recipe, tiny_path):
    """Two data sets share a teacher, and a third has another."""
    folders = [tiny_path, tiny_path, f"{tiny_path}/."]
    several = {"alg": {"name": "opd", "teacher": dict(zip("abc", folders, strict=True))}}
    one, three = (
        estimate_memory(load_recipe(RLConfig, recipe(changes), [])).frozen
        for changes in ({"alg": {"name": "opd", "teacher": tiny_path}}, several)
    )
    assert three == 2 * one > 0


def test_a_model_of_two_teachers_is_loaded_once(tiny_path):
    trainer = trainer_of(tiny_path, OPD(teacher={"a": tiny_path, "b": tiny_path}, kl=KL(coef=0.1)))
    assert sorted(trainer.frozen) == ["ref_logp", "teacher of a", "teacher of b"]
    assert len({id(model) for model in trainer.frozen.values()}) == 1


def test_the_hint_must_hold_the_answer():
    with pytest.raises(ValueError, match=r"write \{answer\}"):
        OPSD(hint="Think well.")
