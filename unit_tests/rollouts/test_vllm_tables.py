"""What vLLM is asked for and what it reports, in tables: kept sets, routes, drafts, and groups that share a request."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from configs.rollout_schema import RolloutConfig
from core.errors import RunStopped
from core.types.allowed_tokens import AllowedTokens
from core.types.drafts import NO_DRAFTS, Drafts
from core.types.truncation import EVERYTHING_KEPT, Truncation
from rollouts.engines.base import Completion
from rollouts.engines.vllm import VllmEngine
from rollouts.engines.vllm_support.drafts import check_drafts, draft_args, read_drafts
from rollouts.engines.vllm_support.kept_sets import ASKED, PROCESSOR, KeptReports, check_masks_of_gpu, truncation_args
from rollouts.engines.vllm_support.routes import RouteReports, check_routes_of_gpu, route_args
from rollouts.stops import StopStrings
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.sentences import tell

TOP = Truncation(top_p=0.9, top_k=20, min_p=0.0)


async def nobody(method: str, **asked: Any) -> list[Any]:
    raise NotImplementedError


def test_sets_are_asked_of_our_processor_on_a_cpu_and_of_vllm_on_a_gpu():
    off, on = engine_config("m"), engine_config("m", truncation=TOP)
    for config, on_cpu, args, joins, params, probe in (
        (off, True, {}, True, asdict(EVERYTHING_KEPT), {}),
        (off, False, {}, True, asdict(EVERYTHING_KEPT), asdict(EVERYTHING_KEPT)),
        (on, False, {"return_sampling_mask": True}, True, asdict(TOP), asdict(TOP)),
        (
            on,
            True,
            {"logits_processors": [PROCESSOR]},
            False,
            {"extra_args": {ASKED: {"key": "k", **asdict(TOP)}}, **asdict(EVERYTHING_KEPT)},
            {},
        ),
    ):
        reports = KeptReports(config, nobody, on_cpu=on_cpu)
        assert truncation_args(config.truncation, on_cpu=on_cpu) == args and reports.may_join == joins
        assert (reports.make_params("k"), reports.make_probe_params()) == (params, probe)


def test_stored_sets_are_those_of_the_rank_that_sampled():
    asked: list[Any] = []

    async def rpc(method: str, **more: Any) -> list[Any]:
        asked.append((method, more))
        return [[], [[3, 5], [4], [9]]]

    async def body() -> None:
        reports = KeptReports(engine_config("m", truncation=TOP), rpc, on_cpu=True)
        output = SimpleNamespace(token_ids=[3, 4])
        keys: list[str] = []
        for _ in range(3):
            with reports.naming() as key:
                keys.append(key)
                assert await reports.read(key, output) == [[3, 5], [4]]
        assert len({*keys}) == 3
        forgotten = [[], [keys[0]], [keys[1]]]
        assert asked == [
            ("feynrl_take_kept", {"key": key, "forget": forget}) for key, forget in zip(keys, forgotten, strict=True)
        ]
        on_gpu = KeptReports(engine_config("m", truncation=TOP), nobody, on_cpu=False)
        with on_gpu.naming() as key:
            output = SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=[[3, 5], [4]]))
            found = await on_gpu.read(key, output)
        assert [one.tolist() for one in found] == [[3, 5], [4]] and found[0].dtype == np.int32 and on_gpu.done == []
        off = KeptReports(engine_config("m"), nobody, on_cpu=True)
        with off.naming() as key:
            assert await off.read(key, None) == []
        assert off.done == []
        with pytest.raises(RunStopped) as stopped:
            await on_gpu.read("k", SimpleNamespace(sampling_mask=None))
        assert str(stopped.value) == "vLLM reported no kept sets (sampling_mask) for a finished request"

    asyncio.run(body())


MASKS = (
    "vLLM on a GPU reports the kept sets of rollout.top_p, top_k and min_p only for requests that it ends itself: "
    "leave out rollout.stop (or use rollout.stop_token_ids), and weight_sync.pause_mode: abort"
)
ASKED_ROUTES = "rollout.router_replay is replay, and vLLM "
ENDS = (
    f"{ASKED_ROUTES}returns routes only for requests that it ends itself: leave out rollout.stop (or use "
    "rollout.stop_token_ids), and weight_sync.pause_mode: abort"
)


@pytest.mark.parametrize(
    ("check", "rollout", "on_gpu", "aborts", "said"),
    [
        (check_masks_of_gpu, {"top_p": 0.9, "stop": ["a"]}, False, True, ""),
        (check_masks_of_gpu, {"top_p": 0.9, "top_k": 5}, True, False, ""),
        (check_masks_of_gpu, {"top_k": 5, "stop": ["a"]}, True, False, MASKS),
        (check_masks_of_gpu, {"top_k": 5}, True, True, MASKS),
        (
            check_masks_of_gpu,
            {"top_p": 0.9},
            True,
            False,
            "vLLM on a GPU reports the kept sets of rollout.top_p and min_p only with a bound on their size: set "
            "rollout.top_k too, such as 100",
        ),
        (check_routes_of_gpu, {"vllm": {"enable_prefix_caching": True}}, True, False, ""),
        (check_routes_of_gpu, {"stop": ["a"]}, True, False, ENDS),
        (check_routes_of_gpu, {}, True, True, ENDS),
        (
            check_routes_of_gpu,
            {},
            False,
            False,
            f"{ASKED_ROUTES}returns routes on a GPU only, where it has Triton: set rollout.engine to hf, or leave "
            "rollout.router_replay out",
        ),
        (
            check_routes_of_gpu,
            {"vllm": {"enable_prefix_caching": False}},
            True,
            False,
            f"{ASKED_ROUTES}keeps routes in its prefix cache: leave rollout.vllm.enable_prefix_caching out",
        ),
    ],
)
def test_recipes_whose_reports_vllm_does_not_give_are_refused(check, rollout, on_gpu, aborts, said):
    recipe: Any = SimpleNamespace(**{"top_k": 0, "stop": [], "vllm": {}, "router_replay": "replay"} | rollout)
    if not said:
        return check(recipe, on_gpu=on_gpu, aborts=aborts)
    assert tell(lambda: check(recipe, on_gpu=on_gpu, aborts=aborts)) == said


def test_routes_of_vllm_are_those_of_the_layers_with_experts():
    asked = [
        route_args(engine_config("m", routes=r, prefix_cache=c))
        for r, c in ((True, True), (True, False), (False, True))
    ]
    assert asked == [{"enable_return_routed_experts": True}, {}, {}]
    reports = RouteReports(engine_config("m"))
    assert reports.read(SimpleNamespace(routed_experts=None), 3) is None
    reports.is_on, reports.layers, reports.experts = True, [1, 3], 8
    found = np.arange(8, dtype=np.uint16).reshape(2, 4, 1)

    def read(found: Any, length: int = 3, known: Any = None) -> Any:
        return reports.read(SimpleNamespace(routed_experts=found), length, known)

    own = read(found)
    assert own.dtype == np.uint8 and own[:, :, 0].tolist() == [[1, 3], [5, 7], [255, 255]]
    known = np.array([[[6], [6]], [[255], [255]]], dtype=np.uint8)
    assert read(found, known=known)[:, :, 0].tolist() == [[6, 6], [5, 7], [255, 255]]
    layers = "and experts in the decoder layers [1, 3]"
    for wrong, length, said in (
        (None, 3, "vLLM reported no routes (routed_experts) for a finished request"),
        (found, 4, f"vLLM reported routes [2, 4, 1] for 3 input tokens, {layers}"),
        (found[:, :3], 3, f"vLLM reported routes [2, 3, 1] for 2 input tokens, {layers}"),
        (found[:, :, 0], 3, f"vLLM reported routes [2, 4] for 2 input tokens, {layers}"),
        (found.astype(np.int32), 3, "vLLM reported the expert 7 in int32, and the model has 8"),
        (found + np.uint16(1), 3, "vLLM reported the expert 8 in uint16, and the model has 8"),
    ):
        assert tell(lambda wrong=wrong, length=length: read(wrong, length), RunStopped) == said


KEY = "rollout.vllm.speculative_config"
EXAMPLE = "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
UNSHOWN = "have not been shown to be exact: leave one of them out"
WITHOUT = f"{KEY} needs a method without weights, ngram or suffix, such as {EXAMPLE}"


@pytest.mark.parametrize(
    ("given", "rollout", "said"),
    [
        (None, {"top_p": 0.9}, ""),
        ({"method": "ngram"}, {}, ""),
        ({"method": "ngram", "rejection-sample-method": "standard"}, {}, ""),
        ({"method": "eagle"}, {}, WITHOUT),
        ({}, {}, WITHOUT),
        ("ngram", {}, WITHOUT),
        (
            {"method": "ngram", "rejection-sample-method": "synthetic"},
            {},
            f"{KEY}: only rejection_sample_method=standard is exact: leave it out",
        ),
        (
            {"method": "suffix"},
            {},
            f"{KEY}: method suffix needs the package arctic-inference: install it, or set method to ngram",
        ),
        *(
            (
                {"method": "ngram"},
                changes,
                f"{KEY} and {name} together have not been shown to be exact: leave one of them out",
            )
            for changes, name in (
                ({"top_p": 0.9}, "rollout.top_p, top_k or min_p"),
                ({"allowed_tokens": ["a"]}, "rollout.allowed_tokens"),
                ({"router_replay": "watch"}, "rollout.router_replay"),
            )
        ),
    ],
)
def test_drafts_that_were_not_shown_to_be_exact_are_refused(given, rollout, said):
    options = {} if given is None else {"speculative_config": given}
    recipe = RolloutConfig(**rollout)
    if not said:
        return check_drafts(options, recipe)
    assert tell(lambda: check_drafts(options, recipe)) == said


def test_drafts_are_counted_from_the_histogram_of_accepted_ones():
    counted = SimpleNamespace(histogram=[4, 3, 0, 2], num_draft_tokens=27)
    assert read_drafts(SimpleNamespace(spec_decode_metrics=counted)) == Drafts(drafted=27, accepted=3 + 2 * 3)
    assert read_drafts(SimpleNamespace(spec_decode_metrics=None)) == NO_DRAFTS
    options = {"speculative_config": {"method": "ngram"}}
    banned = AllowedTokens(banned=(5,))
    assert draft_args(engine_config("m", allowed_tokens=banned)) == {}
    assert draft_args(engine_config("m", options=options)) == {"per_request_spec_decode_metrics": "summary"}
    assert tell(lambda: draft_args(engine_config("m", options=options, allowed_tokens=banned))) == (
        f"{KEY}: vLLM cannot ban tokens in drafts, and the model reads images: leave it out"
    )
    lora: Any = object()
    assert tell(lambda: draft_args(engine_config("m", options=options, lora=lora))) == (
        f"{KEY} has not been tried with an adapter: set weight_sync.lora to merged"
    )


class Changed(VllmEngine):
    async def generate(self, *args: Any, **more: Any) -> Completion:
        return await super().generate(*args, **more)


@pytest.mark.parametrize(
    ("kind", "settings", "on_cpu", "size", "requests"),
    [
        (VllmEngine, {}, True, 3, [(3, 7)]),
        (VllmEngine, {}, True, 1, [(1, 7)]),
        # greedy decoding, sets that are stored by request, and a class that changes each sample
        (VllmEngine, {"temperature": 0.0}, True, 3, [(1, 7), (1, 8), (1, 9)]),
        (VllmEngine, {"truncation": TOP}, True, 2, [(1, 7), (1, 8)]),
        (VllmEngine, {"truncation": TOP}, False, 2, [(2, 7)]),
        (Changed, {}, True, 2, [(1, 7), (1, 8)]),
        # these go on in parts, each of its own
        (VllmEngine, {"pause_mode": "abort"}, True, 2, []),
        (VllmEngine, {"stop_strings": StopStrings(["a"], str, ())}, True, 2, []),
    ],
)
def test_a_group_is_one_request_where_vllm_alone_ends_it(monkeypatch, kind, settings, on_cpu, size, requests):
    asked: list[tuple[int, int]] = []
    parts: list[int] = []
    done = Completion(token_ids=[1], logp=[0.0], versions=[0], stop="eos")

    async def request(self: Any, token_ids: Any, images: Any, *, size: int, max_new_tokens: int, seed: int) -> Any:
        asked.append((size, seed))
        return [done] * size

    async def in_parts(self: Any, token_ids: Any, images: Any, *, max_new_tokens: int, seed: int) -> Any:
        parts.append(seed)
        return done

    monkeypatch.setattr(VllmEngine, "_request_group", request)
    monkeypatch.setattr("rollouts.engines.vllm.Parts.generate", in_parts)
    config = engine_config("m", **settings)
    engine = kind.__new__(kind)
    engine._reports, engine._routes = KeptReports(config, nobody, on_cpu=on_cpu), RouteReports(config)
    engine.prepare_requests(config)
    group = asyncio.run(engine.generate_group([1, 2], size=size, max_new_tokens=4, seed=7))
    assert group == [done] * size and asked == requests
    assert parts == ([] if requests else [7 + i for i in range(size)])


class Storing(VllmEngine):
    """Without vLLM: every request gets two tokens, whose sets are stored under its key."""

    def __init__(self) -> None:
        config = engine_config("m", truncation=TOP)
        self._reports, self._routes = KeptReports(config, self._rpc, on_cpu=True), RouteReports(config)
        self.prepare_requests(config)
        # vLLM's SamplingParams, whose import takes seconds
        self._make_params, self.stored = cast(Any, dict), dict[str, list[Any]]()

    async def _ask(self, token_ids: Any, images: Any, params: Any, ends: Any = None) -> Any:
        self.stored[params["truncation"]["extra_args"][ASKED]["key"]] = [np.array([3, params["seed"]]), np.array([4])]
        output = {"token_ids": [3, 4], "logprobs": SimpleNamespace(logprobs=[-0.5, 0.0]), "finish_reason": "length"}
        output |= {"weight_versions": [SimpleNamespace(version="2", start=0, end=2)], "spec_decode_metrics": None}
        return SimpleNamespace(outputs=[SimpleNamespace(**output)])

    async def _rpc(self, method: str, **asked: Any) -> list[Any]:
        return [self.stored.pop(asked["key"])]


def test_each_sample_has_the_sets_of_its_request():
    group = asyncio.run(Storing().generate_group([1, 2], size=2, max_new_tokens=2, seed=7))
    assert [(done.token_ids, done.versions, done.stop) for done in group] == [([3, 4], [2, 2], "length")] * 2
    sets = [done.kept for done in group]
    assert [kept and (kept.ids.tolist(), kept.sizes.tolist()) for kept in sets] == [
        ([3, 7, 4], [2, 1]),
        ([3, 8, 4], [2, 1]),
    ]
