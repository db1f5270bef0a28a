"""Ranks that compute rows together make the update of one process: every token counts once, wherever it stands."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from configs.schema import RLConfig
from core.errors import UserError
from data_feeds.packing.batches import micro_batches
from driver.checks.explain import explain
from driver.checks.models import check_sequence_parallel
from driver.load_recipe import load_recipe
from driver.resume import bitwise_only_changes, check_settings
from modeling.attention import refuse_sequence_parallel
from modeling.segments import Segments
from modeling.sequence_parallel import RowSlice, SequenceGroup
from unit_tests.helpers.examples import families
from unit_tests.helpers.models import FAMILIES

SEVERAL = {"backend": "ray", "trainer.ranks": 4, "trainer.sequence_parallel": 2}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 50])
def test_slices_of_a_row_hold_every_position_and_every_learnt_token_once(size):
    [[batch]] = micro_batches(families(), "token", 1000, padded=False, share_prefixes=True)
    row = batch.input_ids
    slices = [RowSlice(place=place, size=size, total=len(row)) for place in range(size)]
    held = [own.take(row, fill=-1) for own in slices]
    assert {len(part) for part in held} == {-(-len(row) // size)}
    together = torch.cat(held)
    assert torch.equal(together[: len(row)], row)
    assert (together[len(row) :] == -1).all() and len(together) - len(row) == slices[0].padding < size * len(held[0])
    owned = torch.stack([own.find_own(batch.at) for own in slices])
    assert (owned.sum(0) == 1).all()
    for own, part, mine in zip(slices, held, owned, strict=True):
        assert torch.equal(part[batch.at[mine] - own.begin], row[batch.at[mine]]), "where its logits come from"


def test_padding_of_slices_follows_no_sequence():
    """Else the row would share segments, and attention would copy the keys of all of them."""
    [[batch]] = micro_batches(families(), "token", 1000, padded=False, share_prefixes=False)
    total = len(batch.input_ids)
    size = next(n for n in range(2, total) if total % n)
    rows = Segments.of_batch(batch, SequenceGroup(place=0, size=size, group=None))
    assert rows.lengths == [*batch.lengths.tolist(), -total % size]
    assert rows.chains[-1] == [] and not rows.are_shared


def test_padding_is_a_segment_by_itself():
    [[batch]] = micro_batches(families(), "token", 1000, padded=False, share_prefixes=True)
    plain = Segments.of_batch(batch)
    size = next(n for n in range(2, 9) if sum(plain.lengths) % n)
    padded = Segments.of_batch(batch, SequenceGroup(place=1, size=size, group=None))
    assert padded.lengths[:-1] == plain.lengths and padded.parents == [*plain.parents, -1]
    assert sum(padded.lengths) % size == 0 and 0 < padded.lengths[-1] < size


def config_of(family: str = "llama", **more):
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48, "head_dim": 4}
    return AutoConfig.for_model(family, **shape | more)


@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_heads_that_divide_are_shared_and_keys_that_are_fewer_are_copied(family, size):
    assert refuse_sequence_parallel(config_of(family), size) is None


@pytest.mark.parametrize("size", [3, 5, 6, 8, 24])
def test_heads_that_do_not_divide_are_refused(size):
    said = refuse_sequence_parallel(config_of(), size)
    assert said is not None and "12 heads of queries and 4 of keys and values" in said


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_whole_row_are_refused(kind):
    """A rank that sees the end of a long sequence would turn its positions by another angle than the others."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
    rope |= {"long_factor": [1.0, 1.0], "short_factor": [1.0, 1.0]} if kind == "longrope" else {}
    said = refuse_sequence_parallel(config_of(rope_parameters=rope), 2)
    assert said is not None and kind in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.ranks": 3}, r"sequence_parallel=2 .*ranks=3 is no multiple"),
        ({"trainer.ranks": 1}, r"sequence_parallel=2 .*ranks=1 is no multiple"),
        ({"backend": "local"}, r"backend: local is one process"),
        ({"trainer.sequence_parallel": 0}, r"sequence_parallel.*greater than or equal to 1"),
        ({"trainer.layout": "padded"}, r"sequence_parallel=2 slices packed rows, and layout is padded"),
        ({"trainer.deepspeed": {"sequence_parallel_size": 2}}, r"sequence_parallel_size follows from other keys"),
        ({"model.attention": "sdpa"}, r"trainer\.sequence_parallel=2 .*model\.attention is sdpa: set it to auto"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(recipe, changes, said):
    with pytest.raises(UserError, match=said):
        load_recipe(RLConfig, recipe(SEVERAL | changes), [])


def test_a_model_that_cannot_share_rows_is_refused_before_anything_starts(recipe, tmp_path):
    cfg = load_recipe(RLConfig, recipe(SEVERAL | {"model.path": str(tmp_path)}), []).cfg
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", num_key_value_heads=3).to_dict()))
    alg = SimpleNamespace(teachers={})
    with pytest.raises(UserError, match=r"^trainer\.sequence_parallel=2, and model\.path=.*: the model"):
        check_sequence_parallel(cfg, alg)
    seeing: Any = SimpleNamespace(model_type="gemma3", vision_config={})
    assert "a gemma3 model reads images" in (refuse_sequence_parallel(seeing, 2) or "")


def test_a_run_may_go_on_with_another_number_of_ranks_for_a_row():
    then = {"trainer.lr_schedule": "constant", "trainer.sequence_parallel": 1}
    assert bitwise_only_changes(then, then | {"trainer.sequence_parallel": 2}) == ["trainer.sequence_parallel"]
    check_settings(then, then | {"trainer.sequence_parallel": 2})


def test_explain_tells_groups_from_ranks(recipe):
    said = explain(load_recipe(RLConfig, recipe(SEVERAL), []))
    assert "per group of 2 ranks and update, on 2 such groups (trainer.sequence_parallel)" in said
    assert "each is computed by 2 ranks, which hold 1/2 of its activations each" in said
