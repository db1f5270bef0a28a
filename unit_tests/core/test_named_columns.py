"""Columns whose names an algorithm chose: from samples to the loss, and through pickle."""

import pickle

import numpy as np
import pytest
import torch

from core.types.batch import MissingColumn
from core.types.samples import Prompt, make_sample
from data_feeds.packing.batches import pack, plan_update


def a_sample():
    return make_sample(
        prompt=Prompt(id="p", messages=[]),
        token_ids=[5, 6, 7],
        action_mask=[False, True, True],
        rollout_logp=[0.0, -1.0, -2.0],
        versions=[-1, 0, 0],
        columns={"mine.gap": [0.0, 0.25, 0.5], "ref_logp": [0.0, -3.0, -4.0]},
    )


def test_a_rank_without_work_has_no_value_of_a_named_column():
    [[with_work], [without]] = plan_update([[a_sample()]], "token", 10, ranks=2).batches()
    assert len(with_work.tokens.column("mine.gap")) == 2
    assert len(without.tokens.column("mine.gap")) == len(without.tokens.ref_logp) == 0


def test_a_column_of_any_name_reaches_the_loss_shifted_as_the_others():
    sample = a_sample()
    for tokens in (pack([sample], [1.0]).tokens, pickle.loads(pickle.dumps(pack([sample], [1.0]).to("cpu").tokens))):
        assert torch.equal(tokens.column("mine.gap"), torch.tensor([0.25, 0.5]))
        assert torch.equal(tokens.column("ref_logp"), tokens.ref_logp)
        assert [*tokens.columns] == ["mine.gap"]
        assert tokens.has("mine.gap") and not tokens.has("other")
        with pytest.raises(MissingColumn, match=r"tokens\.other is not there"):
            tokens.column("other")
    assert np.array_equal(sample.columns["mine.gap"], np.array([0, 0.25, 0.5], dtype=np.float32))
