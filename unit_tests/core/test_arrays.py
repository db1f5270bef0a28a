"""The columns of a sample: what they may be, how they cross a border, and how samples are written beside the loop."""

import asyncio
import base64
import json
import os
import pickle
import random
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from algs.credit import whiten
from algs.grpo import GRPO
from algs.turns import reward_to_go
from core.cluster.capacity import Resources
from core.cluster.ray_workers import Cluster
from core.errors import RunStopped, UserError
from core.types.arrays import DOUBLE, SHORT, SINGLE, from_json, list_fields, to_json
from core.types.images import PlacedImage
from core.types.notes import Note
from core.types.samples import LATER_FIELDS, Batch, Prompt, Sample, make_sample
from data_feeds.packing.batches import micro_batches, plan_update
from driver.records import sample_files
from driver.records.sample_files import MAX_WAITING, SampleFiles, make_sample_record
from tools.benchmarks import driver_cost
from unit_tests.helpers import image_models
from unit_tests.helpers.examples import a_changed, a_sample, some_groups, through_checkpoint, with_values

COLUMNS = ("token_ids", "action_mask", "rollout_logp", "versions", "advantage")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": [1, 2, 3]}, "token_ids of a Sample must be a numpy array of int32, found list"),
        ({"token_ids": np.zeros(6, dtype=np.int64)}, "array of int32, found an array of int64"),
        ({"action_mask": np.zeros(6, dtype=np.int32)}, "action_mask .* array of bool, found an array of int32"),
        ({"advantage": torch.zeros(6)}, "advantage .* array of float32, found Tensor"),
        ({"advantage": np.zeros(6)}, "advantage .* array of float32, found an array of float64"),
        (
            {"columns": {"values": np.zeros((6, 1), dtype=np.float32)}},
            r"6, values has the shape \[6, 1\]",
        ),
        ({"excluded": np.zeros(5, dtype=np.bool_)}, r"token_ids has 6, excluded has the shape \[5\]"),
    ],
)
def test_a_column_of_another_kind_is_refused_in_one_sentence(changes, said):
    sample = a_sample(random.Random(0), length=6)
    for change in (partial(replace, sample), sample.replace):
        with pytest.raises(UserError, match=said) as refusal:
            change(**changes)
        assert "\n" not in str(refusal.value)


def test_the_arrays_of_a_sample_are_read_only():
    sample = with_values([[a_sample(random.Random(0))]])[0][0]
    for array in [*(getattr(sample, name) for name in COLUMNS), sample.columns["values"]]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_lists_are_converted_where_asked_and_nothing_is_rounded_away():
    plain = {"prompt": a_sample(random.Random(0)).prompt, "action_mask": [False, True], "versions": [-1, 0]}
    sample = make_sample(**plain, token_ids=[1, 2], rollout_logp=[0, -0.1], excluded=[False, False], advantage=[0, 1])
    dtypes = [getattr(sample, name).dtype for name in (*COLUMNS, "excluded")]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32, np.float32, np.bool_]
    assert make_sample(**plain, token_ids=[1, 2], rollout_logp=[0, -0.1], dtype=DOUBLE).rollout_logp[1] == -0.1
    with pytest.raises(ValueError, match="cannot be written as int32"):
        make_sample(**plain, token_ids=[1, 2.5], rollout_logp=[0, 0])
    with pytest.raises(OverflowError):
        make_sample(**plain, token_ids=[1, 2**31], rollout_logp=[0, 0])


def test_an_advantage_is_a_number_for_all_tokens_or_one_for_each():
    sample = a_sample(random.Random(0), length=6)
    assert sample.with_advantage(0.5).advantage.tolist() == [0.5] * 6
    assert sample.with_advantage(np.arange(6)).advantage.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="broadcast"):
        sample.with_advantage(np.arange(5))


def test_a_changed_sample_is_that_of_dataclasses_replace():
    sample = a_sample(random.Random(0), length=6)
    floats, masks = np.ones(6, dtype=np.float32), np.ones(6, dtype=np.bool_)
    later = {
        "prompt": Prompt(id="other", messages=[]),
        "completion": "7",
        "transcript": [{"role": "assistant", "content": "7"}],
        "reward": 2.0,
        "reward_parts": {"a": 2.0},
        "failure": "\x1b",
        "counts": {"turns": 1.0},
        "notes": [Note(by="judge", text="good")],
        "log": "end",
        "turn_rewards": (1.0,),
        "advantage": floats,
        "columns": {"values": floats},
        "excluded": masks,
    }
    assert later.keys() == LATER_FIELDS
    for name, value in (later | {"stop": "length", "token_ids": np.zeros(6, dtype=np.int32)}).items():
        changed = sample.replace(**{name: value})
        assert changed == replace(sample, **{name: value}) != sample, name
        assert [n for n in list_fields(Sample) if getattr(changed, n) is not getattr(sample, n)] == [name]
    everything = sample.replace(**later)
    assert everything.failure == r"\x1b" and not everything.excluded.flags.writeable
    with pytest.raises(TypeError, match="rewards"):
        sample.replace(rewards=1.0)
    with pytest.raises(UserError, match="turn_rewards"):
        sample.replace(turn_rewards=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))


@pytest.mark.parametrize(("length", "buffers"), [(1, 0), (SHORT, 0), (SHORT + 1, 4)])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_a_sample_crosses_the_border_whole_and_read_only(length, buffers, dtype):
    """Short arrays within the pickle, long ones beside it, which Ray hands over without a copy."""
    columns = {"action_mask": [i % 3 == 1 for i in range(length)], "versions": [*range(-1, length - 1)]}
    given = {"token_ids": [*range(length)], "rollout_logp": [-0.1 * i for i in range(length)], "dtype": dtype}
    sample = make_sample(prompt=Prompt(id="p", messages=[]), **columns, **given, reward=0.5, completion="7")
    beside: list[pickle.PickleBuffer] = []
    inline = pickle.dumps(sample, protocol=5, buffer_callback=beside.append)
    assert len(beside) == buffers
    again = pickle.loads(inline, buffers=[bytes(b) for b in beside])
    assert again == sample and again.prompt == sample.prompt
    for name in ("token_ids", "action_mask", "rollout_logp", "versions"):
        array = getattr(again, name)
        assert array.dtype == getattr(sample, name).dtype
        assert not array.flags.writeable and array.flags.aligned


def test_a_sample_without_tokens_is_pickled():
    empty = np.zeros(0, dtype=np.int32)
    none = {"action_mask": empty.astype(np.bool_), "rollout_logp": empty.astype(np.float32)}
    sample = Sample(prompt=Prompt(id="p", messages=[]), token_ids=empty, versions=empty, **none)
    assert pickle.loads(pickle.dumps(sample)) == sample and sample.loss_mask.tolist() == []


def test_samples_are_equal_where_every_entry_is():
    one, same = (a_sample(random.Random(0)) for _ in range(2))
    assert one == same and one != replace(same, reward=None) and one != "a sample"
    other = same.token_ids.copy()
    other[0] += 1
    assert one != replace(same, token_ids=other) and one != replace(same, advantage=None)
    filled = a_changed(one, columns={"values": [0.0] * len(one.token_ids)})
    assert filled == replace(filled) and filled != one


def test_a_batch_crosses_the_border_as_it_is_and_its_memory_is_its_own():
    """Protocol 5, as Ray uses it: the arrays are handed over as they are, and come out read-only."""
    [[batch]] = micro_batches(with_values(some_groups(40, 4)), "token", 10**6)
    buffers: list[pickle.PickleBuffer] = []
    inline = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    tensors = [batch.input_ids, batch.position_ids, batch.segment_ids, batch.parents, batch.lengths]
    tensors += [batch.at, batch.labels]
    names = ("seq_ids", "weight", "advantage", "rollout_logp", "values", "returns")
    tensors += [getattr(batch.tokens, name) for name in names]
    assert len(inline) < 4000 and sum(b.raw().nbytes for b in buffers) == sum(t.nbytes for t in tensors)
    sent = [bytes(b) for b in buffers]
    got = pickle.loads(inline, buffers=sent)
    assert isinstance(got, Batch) and not got.tokens.has("prox_logp")
    for name in names:
        assert torch.equal(getattr(got.tokens, name), getattr(batch.tokens, name))
        assert getattr(got.tokens, name).dtype == getattr(batch.tokens, name).dtype
    assert torch.equal(got.input_ids, batch.input_ids) and torch.equal(got.labels, batch.labels)
    got.tokens.advantage.mul_(2)  # a loss may do that
    assert sent == [bytes(b) for b in buffers], "and others still read what was sent"


def test_numbers_are_narrow_until_a_batch_is_moved():
    plan = plan_update(with_values(some_groups(5, 4)), "token", 10**6, whole_groups=True)
    [[packed]] = plan.batches()
    moved = packed.to("cpu")
    pairs = [(getattr(packed, name), getattr(moved, name)) for name in ("input_ids", "position_ids", "at", "labels")]
    pairs += [(packed.segment_ids, moved.segment_ids), (packed.tokens.seq_ids, moved.tokens.seq_ids)]
    for narrow, wide in [*pairs, (packed.tokens.group_ids, moved.tokens.group_ids)]:
        assert (narrow.dtype, wide.dtype) == (torch.int32, torch.int64) and narrow.tolist() == wide.tolist()
    for name in ("parents", "lengths"):
        assert getattr(packed, name) is getattr(moved, name)
    assert moved.tokens.weight.dtype == torch.float32


def test_a_buffer_in_a_checkpoint_is_as_large_as_its_arrays_and_comes_back():
    group = [replace(s, completion="7") for s in some_groups(1, 3)[0]]
    group[0] = a_changed(group[0], columns={"values": [0.1] * len(group[0].token_ids)})
    buffer, text, again = through_checkpoint(group)
    assert text.count("\n") < 170, "not a line for each token"
    assert again.waiting == buffer.waiting and again.waiting[0].group[0].completion == "7"


def test_images_in_a_checkpoint_are_there_once_and_come_back():
    """One of the prompt, one that an environment showed, and one in a family with positions of three axes."""
    first, second = image_models.draw(seed=0), image_models.draw(24, 40, seed=1)
    prompt = Prompt(id="p", messages=[image_models.say("user", first, "?")])
    group: list[Sample] = []
    for i, grid in enumerate([None, (2, 3)]):
        places = (PlacedImage(first, 1, 3), PlacedImage(second, 5, 11, grid))
        n = 14 + i
        group.append(
            make_sample(
                prompt=prompt,
                token_ids=list(range(n)),
                action_mask=[t in (3, 4) or t > 11 for t in range(n)],
                rollout_logp=[-1.0] * n,
                versions=[0] * n,
                images=places,
                transcript=[
                    image_models.say("assistant", "up"),
                    image_models.say("user", second),
                    image_models.say("assistant", "down"),
                ],
            )
        )
    buffer, text, again = through_checkpoint(group)
    for image in (first, second):
        assert text.count(base64.b64encode(image.data).decode()) == 1
    assert again.waiting == buffer.waiting
    assert [s.images for s in again.waiting[0].group] == [s.images for s in group]
    assert again.waiting[0].group[0].transcript == group[0].transcript


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<f4", "?"])
def test_an_array_in_json_is_the_same_array_on_every_machine(dtype):
    array = np.array([0, 1, 1], dtype=dtype)
    got = from_json(json.loads(json.dumps(to_json({"a": array, "b": None, "c": [1]}))))
    assert got["b"] is None and got["c"] == [1]
    assert np.array_equal(got["a"], array) and got["a"].dtype.isnative
    assert not got["a"].flags.writeable, "what was read is shared"


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("factor", [0.0, 0.3, 0.95, 1.0])
def test_discounting_in_passes_is_discounting_token_by_token(n, factor):
    values = np.random.default_rng(n).normal(size=n)
    want, following = [], 0.0
    for x in values[::-1]:
        following = x + factor * following
        want.append(following)
    assert reward_to_go(values, factor) == pytest.approx(np.array(want[::-1]), rel=1e-13, abs=1e-13)


def test_whitening_does_not_depend_on_the_order_of_the_samples():
    draw = np.random.default_rng(0)
    rows = [draw.normal(size=n) for n in (1, 50, 3, 0, 700)]
    forwards, backwards = whiten(rows), whiten(rows[::-1])[::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))


@pytest.mark.verify
def test_the_cost_of_the_driver_is_measured_stage_by_stage(capsys):
    """What is printed, and not how fast this machine is."""
    code = driver_cost.main(["--tokens", "5000"])
    heading, names, row, verdict, told = capsys.readouterr().out.splitlines()
    assert "per million tokens" in heading
    assert names.split()[:7] == ["tokens", *driver_cost.STAGES, "together"]
    tokens, *each = (float(cell.replace(",", "")) for cell in row.split())
    assert tokens >= 5000 and len(each) == len(driver_cost.STAGES) + 2
    assert sum(each[:5]) == pytest.approx(each[5], abs=5e-4)
    assert verdict.endswith("missed" if code else "reached")
    assert told == f"row of docs/results.md: {each[5]:.3f} s of CPU time per million tokens"


def test_a_sample_file_says_the_advantage_in_as_few_digits_as_it_has():
    sample = replace(a_sample(random.Random(0)), completion="7").with_advantage(0.1)
    record = make_sample_record(sample, 3)
    assert record["advantage"] == 0.1 and record["completion"] == "7" and record["versions"] == [0]
    assert record["new_tokens"] == int(sample.action_mask.sum())
    assert make_sample_record(replace(sample, failure="timeout"), 3)["advantage"] is None
    json.dumps(record)


def test_samples_are_written_beside_the_loop_and_all_before_the_end(tmp_path, monkeypatch):
    """The loop is as many steps ahead as may wait, and no more; then every file is whole."""
    may_write, write = threading.Event(), sample_files.write_samples

    def write_when_told(*args):
        may_write.wait(60)
        write(*args)

    monkeypatch.setattr(sample_files, "write_samples", write_when_told)
    files, groups = SampleFiles(tmp_path), some_groups(2, 2)

    async def loop():
        for step in range(MAX_WAITING):
            await files.write(step, groups)
        assert not list(tmp_path.iterdir()), "the loop did not wait"
        ahead = asyncio.ensure_future(files.write(MAX_WAITING, groups))
        await asyncio.sleep(0)
        assert not ahead.done(), "and now it does"
        may_write.set()
        await ahead
        await files.flush()

    asyncio.run(loop())
    assert [len(path.read_text().splitlines()) for path in sorted(tmp_path.iterdir())] == [4] * (MAX_WAITING + 1)
    assert files.close() == []


def test_samples_that_cannot_be_written_stop_the_run(tmp_path):
    files, groups = SampleFiles(tmp_path / "gone"), some_groups(1, 1)
    (tmp_path / "gone").touch()  # a file, where a folder was

    async def loop():
        await files.write(0, groups)
        await files.flush()

    said = "step_00000.jsonl cannot be written: Not a directory; the steps before are logged"
    with pytest.raises(RunStopped, match=said):
        asyncio.run(loop())
    with suppress(RunStopped):  # the thread may be as fast as the loop
        asyncio.run(files.write(1, groups))
    assert all("step_00001.jsonl cannot be written" in line for line in files.close())


def test_an_interrupted_run_leaves_whole_sample_files(tmp_path):
    files, groups = SampleFiles(tmp_path), some_groups(4, 4)

    async def loop():
        writing = [asyncio.ensure_future(files.write(step, groups)) for step in range(4)]
        await asyncio.sleep(0)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)

    asyncio.run(loop())
    assert files.close() == []
    assert {len(path.read_text().splitlines()) for path in tmp_path.iterdir()} == {16}


class Sender:
    """Sends samples from another process, as an engine's worker does."""

    def __init__(self, info):
        self.group = some_groups(1, 2, longest=24)[0] + [a_sample(random.Random(1), length=200_000)]

    def send(self) -> list[Sample]:
        return self.group

    def count_threads(self) -> tuple[int, str | None]:
        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def measure(self, micro: list[Batch]) -> list[bool]:
        return [bool(torch.equal(b.tokens.advantage.mul_(2), b.tokens.advantage)) for b in micro]


@pytest.mark.slow
def test_arrays_that_come_out_of_ray_are_views_that_nobody_can_write_into():
    async def talk():
        cluster = Cluster(None)
        try:
            workers = await cluster.spawn("sender", 1, Sender, resources=Resources(threads=3), timeout_s=100)
            assert await workers.call_one(0, Sender.count_threads) == (3, "3")  # Ray tells libraries to use one
            free = await cluster.spawn("free", 1, Sender, resources=Resources(), timeout_s=100)
            cores = len(os.sched_getaffinity(0))  # all of them, on a machine without GPUs
            assert await free.call_one(0, Sender.count_threads) == (cores, str(cores))
            got = await workers.call_one(0, Sender.send)
            assert got == Sender(None).group
            for sample in got:
                for name in COLUMNS:
                    assert not getattr(sample, name).flags.writeable and not getattr(sample, name).flags.owndata
            credited = GRPO().compute_advantages([got])
            batches = micro_batches(credited, "token", 10**6)
            assert await workers.scatter(Sender.measure, batches) == [[True] * len(batches[0])]
        finally:
            cluster.close()

    asyncio.run(talk())
