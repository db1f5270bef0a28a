"""Engines in tables: what one that implements nothing says, the order of sleep, and the requests to a server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from core.errors import ProcessDied, RunStopped, UserError
from rollouts.engines.base import Capabilities, Completion, Engine, EngineLacks
from rollouts.engines.hf import HfEngine
from rollouts.engines.http import COMMAND, HttpEngine
from rollouts.engines.sleeping import Sleeper, SleepState
from rollouts.engines.vllm import VllmEngine
from unit_tests.helpers.engine_server import CONTEXT, Server, play, settings_of
from unit_tests.helpers.engines import engine_config
from unit_tests.helpers.sentences import tell


@pytest.fixture(autouse=True)
def one_ssl_context(monkeypatch):
    """Read the certificates once."""
    monkeypatch.setattr(ssl, "create_default_context", CONTEXT)


class Bare(Engine):
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def generate(self, token_ids, *, max_new_tokens, seed, **seen):
        self.asked.append((token_ids, max_new_tokens, seed, seen))
        return Completion(token_ids=[seed], logp=[0.0], versions=[0], stop="eos")


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_is_one_request_for_each_seed(size):
    engine, image = Bare(), object()
    for images, seen in (((), {}), ((image,), {"images": (image,)})):
        engine.asked.clear()
        call = engine.generate_group([1, 2], size=size, max_new_tokens=4, seed=7, images=images)  # type: ignore[arg-type]
        assert [one.token_ids for one in asyncio.run(call)] == [[7 + i] for i in range(size)]
        assert engine.asked == [([1, 2], 4, 7 + i, seen) for i in range(size)]


LACKS: list[tuple[Callable[[Engine], Awaitable[Any]], str]] = [
    (lambda e: e.load_weights(1, []), "this engine does not run in the trainer's process"),
    (lambda e: e.join_broadcast(address="a", port=1, first_rank=1, members=2), "this engine cannot join a broadcast"),
    (lambda e: e.begin_chunks(), "this engine cannot load chunks"),
    (lambda e: e.load_chunk(b""), "this engine cannot load chunks"),
    (lambda e: e.receive_weights(1), "this engine cannot receive weights from another process"),
    (lambda e: e.sleep(), "this engine does not sleep"),
    (lambda e: e.wake("weights"), "this engine does not sleep"),
    (
        lambda e: e.start_trace(trace=True, memory=False),
        "this engine has no profiler: leave profile out",
    ),
]


def test_an_engine_of_ones_own_says_what_it_lacks():
    async def wait(call: Awaitable[Any]) -> Any:
        return await call

    for call, said in LACKS:
        assert tell(lambda call=call: asyncio.run(wait(call(Bare()))), EngineLacks) == said
    assert asyncio.run(Bare().close()) is None


def test_a_recipe_that_needs_more_than_an_engine_has_is_refused():
    recipe: Any = SimpleNamespace(engine="my.py", router_replay="watch", quantization="int8")
    kept = {"on_gpu": False, "aborts": False}
    assert tell(lambda: Bare.check_truncation(recipe, **kept)) == (
        "rollout.top_p, top_k or min_p is set, and rollout.engine=my.py does not report kept sets: apply "
        "EngineConfig.truncation and return Completion.kept, as in rollouts/engines/hf.py, and say so in its "
        "capabilities"
    )
    assert tell(lambda: Bare.check_routes(recipe, **kept)) == (
        "rollout.router_replay is watch, and rollout.engine=my.py does not report routes: return Completion.routes "
        "where EngineConfig.routes is set, as in rollouts/engines/hf.py, and say so in its capabilities"
    )
    assert tell(lambda: Bare.check_options({"max_num_seqs": 3}, recipe)) == (
        "rollout.vllm has options of vLLM, and rollout.engine is my.py: leave rollout.vllm out"
    )
    assert tell(lambda: Bare.check_quantization(recipe, dtype="float32", on_gpu=False)) == (
        "rollout.quantization is int8, and rollout.engine=my.py does not round its linear layers: set rollout.engine "
        "to vllm or hf, or leave rollout.quantization out"
    )
    assert tell(lambda: Bare.check_adapter(engine="my.py", dtype="float32", on_gpu=False)) == (
        "weight_sync.lora is adapter, and rollout.engine=my.py does not sample with an adapter beside the weights: "
        "set rollout.engine to vllm, or weight_sync.lora to merged"
    )
    Bare.check_options({}, recipe)

    class Able(Bare):
        capabilities = Capabilities(kept_sets=True, routes=True, adapter=True)

    Able.check_truncation(recipe, **kept)
    Able.check_routes(recipe, **kept)
    Able.check_adapter(engine="my.py", dtype="float32", on_gpu=False)


def test_a_recipe_may_ask_of_each_engine_what_it_can_do():
    def features(engine: type[Engine]) -> set[str]:
        return {name for name, there in asdict(engine.capabilities).items() if there}

    every = {*asdict(Capabilities())}
    assert features(Bare) == set()
    assert every - features(HfEngine) == {"tensor_parallel", "nccl", "adapter", "file_names", "ipc"}
    assert every - features(VllmEngine) == {"batch_invariant"}
    assert features(HttpEngine) == {"tensor_parallel", "broadcast", "chunks", "deltas", "file_names"}


AWAKE, ASLEEP, HALF = SleepState.AWAKE, SleepState.ASLEEP, SleepState.WEIGHTS_AWAKE
SLEEP: dict[str, dict[SleepState, SleepState | str]] = {
    "sample": {
        AWAKE: AWAKE,
        ASLEEP: "an engine was to sample while it was asleep: wake its weights and its cache",
        HALF: "an engine was to sample while it was awake only with its weights: wake its weights and its cache",
    },
    "load": {
        AWAKE: AWAKE,
        ASLEEP: "an engine was sent weights while it was asleep: wake its weights first",
        HALF: HALF,
    },
    "sleep": {
        AWAKE: ASLEEP,
        ASLEEP: "an engine was to sleep while it was asleep",
        HALF: "an engine was to sleep while it was awake only with its weights",
    },
    "sleep, busy": {
        AWAKE: "an engine was to sleep while it had 1 requests: wait until they are finished",
        ASLEEP: "an engine was to sleep while it was asleep",
    },
    "weights": {
        AWAKE: "an engine was to wake its weights while it was awake",
        ASLEEP: HALF,
        HALF: "an engine was to wake its weights while it was awake only with its weights",
    },
    "kv_cache": {
        AWAKE: "an engine was to wake its kv_cache while it was awake",
        ASLEEP: "an engine was to wake its kv_cache while it was asleep",
        HALF: AWAKE,
    },
}


def test_an_engine_sleeps_and_wakes_in_order():
    for what, rows in SLEEP.items():
        for before, found in rows.items():
            sleeper = Sleeper()
            sleeper.state = before
            calls: dict[str, Callable[[], None]] = {
                "sample": sleeper.check_sampling,
                "load": sleeper.check_loading,
                "sleep": lambda s=sleeper: s.fall_asleep(running=0),
                "sleep, busy": lambda s=sleeper: s.fall_asleep(running=1),
                "weights": lambda s=sleeper: s.wake("weights"),
                "kv_cache": lambda s=sleeper: s.wake("kv_cache"),
            }
            if isinstance(found, str):
                assert tell(calls[what], RunStopped) == found and sleeper.state is before
            else:
                calls[what]()
                assert sleeper.state is found and sleeper.may_sample == (found is AWAKE)


def reply_of(*ids: int, end: str = "stop", spans: Any = (("default", 0, 2),)) -> dict[str, Any]:
    content = [{"logprob": -0.5 * i} for i in range(len(ids))]
    weights = [{"version": version, "start": start, "end": stop} for version, start, stop in spans]
    choice = {"token_ids": [*ids], "finish_reason": end, "logprobs": {"content": content}, "weight_versions": weights}
    return {"choices": [choice]}


def test_a_request_to_a_server_is_of_tokens_and_its_answer_a_completion():
    params = {
        **{"temperature": 0.7, "max_tokens": 9, "seed": 5, "logprobs": 0, "stop_token_ids": [1]},
        **{"ignore_eos": True, "detokenize": False},
    }
    for answer, starts_empty, versions, stop in (
        (reply_of(3, 4), False, [-1, -1], "eos"),
        (reply_of(3, 4, end="length"), True, [-1, -1], "length"),
        (reply_of(3, 4, 1, spans=(("default", 0, 1), ("6", 1, 2), ("7", 2, 3))), True, [-1, 6, 7], "eos"),
    ):
        server = Server(generate=answer)
        _, done = play(
            server, lambda e: e.generate([1, 2], max_new_tokens=9, seed=2**63 + 5), starts_empty=starts_empty
        )
        assert server.asked == [("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": params})]
        ids = answer["choices"][0]["token_ids"]
        assert (done.token_ids, done.versions, done.stop) == (ids, versions, stop)
        assert done.logp == [-0.5 * i for i in range(len(ids))] and done.kept is None


def test_an_answer_that_is_no_completion_stops_the_run():
    for answer, said in (
        (reply_of(3, 4, end="abort"), "{} ended a request with 'abort' instead of a completion"),
        (
            reply_of(3, 4, spans=(("3", 0, 2),)),
            "rollout.servers: {} has weights of a run in place of model.path: start it again",
        ),
    ):
        address, told = play(Server(generate=answer), lambda e: e.generate([1, 2], max_new_tokens=9, seed=5))
        assert told == f"RunStopped: {said.format(address)}"
    for answer in (b"hello", b"[" * 5000):
        address, told = play(Server(generate=answer), lambda e: e.generate([1], max_new_tokens=9, seed=5))
        said = f"{address} answered /inference/v1/generate with no JSON: {answer.decode():.40}"
        assert told.startswith(f"RunStopped: {said}")
    refusing = Server(generate="x" * 9)
    refusing.status["generate"] = 500
    address, told = play(refusing, lambda e: e.generate([1], max_new_tokens=9, seed=5))
    assert told == f'RunStopped: {address} answered /inference/v1/generate with 500: "xxxxxxxxx"'


def test_a_probe_reads_the_tokens_after_the_first():
    logp = [None, {"6": {"logprob": -1.5}, "9": {"logprob": -9.0}}, {"7": {"logprob": -2.5}}]
    server = Server(generate={"prompt_logprobs": logp})
    assert play(server, lambda e: e.probe([5, 6, 7]))[1] == [-1.5, -2.5]
    params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    params |= {"skip_reading_prefix_cache": True}
    assert server.asked == [("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": params})]


FINE = {"results": [""]}


def rpc(method: str, **kwargs: Any) -> tuple[str, Any]:
    return "/collective_rpc", {"method": method, "kwargs": kwargs}


PAUSE = ("/pause?mode=keep&clear_cache=false", None)
DONE = [("/finish_weight_update", {"weight_version": "4"}), rpc("feynrl_untouched")]
CLEAR = ("/reset_prefix_cache?reset_running_requests=true", None)
END = [*DONE, CLEAR, ("/resume", None)]


def test_weights_reach_a_server_by_broadcast_or_in_chunks():
    async def by_broadcast(engine: HttpEngine) -> None:
        await engine.begin_chunks()
        await engine.join_broadcast(address="here", port=5, first_rank=2, members=7)
        await engine.pause()
        await engine.receive_weights(4)

    async def by_chunks(engine: HttpEngine) -> None:
        await engine.pause()
        await engine.begin_chunks()
        await engine.load_chunk("name of an object")
        await engine.load_chunk(b"\x00\x01")
        await engine.receive_weights(4)

    joined = {"address": "here", "port": 5, "first_rank": 2, "members": 7, "timeout_s": 30.0}
    begin = rpc("feynrl_begin", adapter=False)
    parts = ({}, {"chunk": "name of an object"}, {"encoded": "AAE="})
    empty, by_name, by_bytes = (rpc("feynrl_load_part", adapter=False, update_info=part) for part in parts)
    for body, asked in (
        (by_broadcast, [begin, rpc("feynrl_join", init_info=joined), PAUSE, begin, empty, *END]),
        (by_chunks, [PAUSE, begin, by_name, by_bytes, *END]),
    ):
        server = Server(collective_rpc=FINE, reset_prefix_cache={"success": True})
        assert play(server, body, starts_empty=True, timeout_s=30.0)[1] is None and server.asked == asked


def test_an_update_that_a_server_did_not_finish_stops_the_run():
    async def update(engine: HttpEngine) -> None:
        await engine.receive_weights(4)

    begun = [{"results": []}, FINE]
    cleared = {"success": True}
    for answers, cleared_to, said in (
        (
            [*begun, {"results": [[], ["a.weight", "b.weight"]]}],
            cleared,
            "RunStopped: the sync of version 4 had no values for 2 parameters of rank 1 of {}, such as a.weight",
        ),
        (
            [*begun, {"results": [[], []]}],
            {"success": False},
            "RunStopped: {} did not clear its prefix cache for version 4",
        ),
    ):
        server = Server(collective_rpc=[*answers], reset_prefix_cache=cleared_to)
        address, told = play(server, update, starts_empty=True)
        assert told == said.format(address) and ("/resume", None) not in server.asked
    sums = [{"a": 1}, {"b": 2}]
    assert play(Server(collective_rpc={"results": sums}), lambda e: e.read_fingerprint())[1] == sums


def test_a_server_that_does_not_fit_is_refused_before_the_start():
    def start(**settings: Any) -> str:
        return tell(lambda: HttpEngine(engine_config("here/m", **settings)))

    assert start() == "rollout.engine is http, and rollout.servers has no address: add one for each engine"
    assert start(server="http://there", pause_mode="abort") == (
        "weight_sync.pause_mode is abort, and rollout.engine is http: set it to keep or wait"
    )
    for said, answer, status in (
        ("does not tell its settings", {}, 404),
        ("does not tell its settings as vLLM does", {}, 200),
        (
            "has --max-model-len 255, and 256 is needed",
            {"vllm_config": settings_of(max_model_len=255)},
            200,
        ),
        (
            "has --model 'other' where 'm' is needed",
            {"vllm_config": settings_of(model="/m/other")},
            200,
        ),
    ):
        server = Server(server_info=answer)
        server.status["server_info"] = status
        with server.running() as address:
            told = start(server=f"{address}/")
            assert told == f"rollout.servers: {address} {said}: start it with {COMMAND}"
    told = "rollout.engine is http, and backend is local, where no trainer sends weights: set it to ray"
    with Server().running() as address:
        engine = HttpEngine(engine_config("here/m", server=address))
        assert tell(lambda: asyncio.run(engine.load_weights(1, [])), UserError) == told
    assert start(server=address).startswith(f"rollout.servers: {address} does not answer: ConnectError")


def test_a_server_that_goes_is_a_process_that_died():
    server = Server()

    with server.running() as address:
        engine = HttpEngine(engine_config("here/m", server=address))

    async def ask() -> None:
        await engine.pause()

    with pytest.raises(ProcessDied) as died:
        asyncio.run(ask())
    assert str(died.value).startswith(f"rollout.servers: {address} does not answer: ConnectError")
    assert isinstance(died.value.__cause__, httpx.HTTPError)
