"""Beginning of a turn, and the reading of vLLM's answers, in tables of whole results and sentences."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from core.errors import RunStopped, TransportFailed, UserError
from data_feeds.chat.tool_parsing import PlainParser
from rollouts.agents.processes import name_endpoint
from rollouts.engines.vllm_support.requests import raise_first, read_stop, read_versions
from rollouts.engines.vllm_support.settings import CORES, check_adapter_dtype, prepare_cpu, prepare_gpu
from rollouts.turns import EpisodeRules, Played, begin_transcript, join_tools
from unit_tests.helpers.episodes import PROMPT, Words
from unit_tests.helpers.examples import sample_of


class Reader:
    """Parser that is not the plain one."""

    def parse(self, ids, text, tools):
        raise NotImplementedError


def tool(name: str):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def rules(**more) -> EpisodeRules:
    return EpisodeRules(seed_of_turn=lambda turn: turn, max_new_tokens=9, max_turns=2, timeout_s=1.0, **more)


def test_tools_of_row_and_environment_are_joined_in_order():
    a, b, c = tool("a"), tool("b"), tool("c")
    row = replace(PROMPT, tools=[a, b])
    assert join_tools(row, [c], Reader()) == [a, b, c] and join_tools(PROMPT, [], PlainParser()) == []
    assert row.tools == [a, b]
    with pytest.raises(UserError) as twice:
        join_tools(row, [c, b], Reader())
    assert str(twice.value) == "the row p and rollout.env both have a tool b: rename one of them"
    for prompt, given in ((row, []), (PROMPT, [c])):
        with pytest.raises(UserError) as unread:
            join_tools(prompt, given, PlainParser())
        assert str(unread.value) == (
            "rollout.tool_parser is unset, the environment has tools, and the tokenizer has no response template: "
            "nothing would read the calls; name the form in which the model writes them (hermes, llama3_json, ...)"
        )


def test_a_transcript_begins_with_the_prompt_that_the_player_saw():
    given = [{"role": "user", "content": "7"}]
    plain = begin_transcript(PROMPT, [], [], Words(), rules(max_prompt_tokens=2))
    assert plain.prompt is PROMPT and plain.ids == [1, 2] and plain.tokens_left == 9 and plain.messages == []
    told = begin_transcript(PROMPT, given, [], Words(), rules(max_prompt_tokens=3))
    assert told.prompt == replace(PROMPT, messages=[*PROMPT.messages, *given]) and told.ids == [1, 2, 7]
    armed = begin_transcript(PROMPT, [], [tool("a")], Words(), rules(parser=Reader()))
    assert armed.prompt == replace(PROMPT, tools=[tool("a")]) and armed.ids == [1, 2]
    with pytest.raises(UserError) as refused:
        begin_transcript(PROMPT, given, [], Words(), rules(max_prompt_tokens=2))
    assert str(refused.value) == (
        "data.max_prompt_tokens=2: the prompt p has 3 tokens with what the environment adds to it (tools, first "
        "messages): raise data.max_prompt_tokens"
    )


def test_the_first_failure_of_an_episode_stays():
    messages = [{"role": "assistant", "content": "2"}]
    sample = sample_of([1, 2], [False, True], reward_parts={"won": 1.0})
    failed = Played(sample=sample, messages=messages, turn_scores=[{"won": 1.0}]).fail("broken")
    assert (failed.sample.failure, failed.sample.reward_parts, failed.turn_scores) == ("broken", {}, [])
    assert failed.messages == messages and sample.reward_parts == {"won": 1.0}
    assert failed.fail("later").sample.failure == "broken"


def test_versions_are_spans_of_tokens():
    spans = [("default", 0, 2), ("3", 2, 3), ("12", 3, 6), ("13", 6, 6)]
    output = SimpleNamespace(weight_versions=[SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans])
    assert read_versions(output) == [-1, -1, 3, 12, 12, 12]


def test_vllm_ends_a_request_at_a_stop_or_at_the_length():
    assert (read_stop("stop"), read_stop("length")) == ("eos", "length")
    for other in ("abort", None):
        with pytest.raises(RunStopped) as stopped:
            read_stop(other)
        assert str(stopped.value) == f"vLLM ended a request with {other!r} instead of a completion"


@pytest.mark.parametrize(
    ("failures", "said"),
    [([], ""), (["", ""], ""), (["lost"], "lost"), (["", "lost", "gone"], "rank 1: lost"), (["a", ""], "rank 0: a")],
)
def test_the_first_rank_that_failed_is_named(failures, said):
    if not said:
        return raise_first(failures)
    with pytest.raises(TransportFailed) as failed:
        raise_first(failures)
    assert str(failed.value) == said


@pytest.mark.parametrize(
    ("cores", "ranks", "bound", "first"),
    [
        ([3, 1, 2], 1, "1,2,3", [1, 2, 3]),
        ([0, 1, 2, 3], 2, "0,1|2,3", [0, 1]),
        ([9, 5, 7, 4, 6], 2, "4,5|6,7,9", [4, 5]),
        ([4, 5], 3, "4|4|5", [4]),
        ([8], 3, "8|8|8", [8]),
    ],
)
def test_ranks_on_a_cpu_divide_the_cores(cores, ranks, bound, first, monkeypatch):
    for name in (CORES, "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert prepare_cpu(cores, ranks) == first
    names = (CORES, "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_COMPILE_THREADS", "VLLM_CPU_KVCACHE_SPACE")
    assert [os.environ.get(name) for name in names] == [bound, "1", "1", None]


def test_variables_of_a_gpu_leave_the_users(monkeypatch):
    method, precision = "VLLM_WORKER_MULTIPROC_METHOD", "TRITON_F32_DEFAULT"
    for dtype, before, after in (
        ("bfloat16", (None, None), ("spawn", None)),
        ("float32", (None, None), ("spawn", "ieee")),
        ("float32", ("fork", "tf32"), ("fork", "tf32")),
    ):
        for name, value in zip((method, precision), before, strict=True):
            monkeypatch.setenv(name, "x")  # so that it is restored
            os.environ.pop(name) if value is None else monkeypatch.setenv(name, value)
        prepare_gpu(dtype)
        assert (os.environ.get(method), os.environ.get(precision)) == after


def test_an_adapter_in_float32_is_refused_on_a_gpu():
    check_adapter_dtype("float32", on_gpu=False)
    check_adapter_dtype("bfloat16", on_gpu=True)
    with pytest.raises(UserError) as refused:
        check_adapter_dtype("float32", on_gpu=True)
    assert str(refused.value) == (
        "weight_sync.lora is adapter and model.dtype is float32, and vLLM's kernels for adapters take no float32 on a "
        "GPU: set model.dtype to bfloat16, or weight_sync.lora to merged"
    )


@pytest.mark.parametrize(
    ("set_before", "want"),
    [
        ({}, "127.0.0.1,localhost,here"),
        ({"NO_PROXY": "a.b"}, "a.b,127.0.0.1,localhost,here"),
        ({"no_proxy": "c.d", "NO_PROXY": ""}, "c.d,127.0.0.1,localhost,here"),
    ],
)
def test_an_agent_reaches_the_policy_without_a_proxy(monkeypatch, set_before, want):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    named = name_endpoint(SimpleNamespace(base_url="http://here:9/s/1/v1", api_key="k"))
    assert (named["NO_PROXY"], named["no_proxy"]) == (want, want)
