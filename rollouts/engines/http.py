"""Engine that somebody else started: `vllm serve` at an address, with the trainer's weights.

The server runs our worker extension. So weights reach its processes as they reach those of the engine vllm: from the
trainers' broadcast, in requests or from a store, with the same checksums. Prompts are token ids
(`/inference/v1/generate`).
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from core.errors import ProcessDied, RunStopped, UserError, name_error, shorten
from core.text.json_text import decode_json
from core.timing.deadlines import ENGINE_RPC_GRACE_S
from core.types.images import PlacedImage
from core.types.weights import Bucket
from rollouts.engines.base import Capabilities, Completion, Engine, EngineConfig, make_completion
from rollouts.engines.vllm_support.requests import UNPUBLISHED, raise_first
from trainers.weight_sync.base import Chunk

TRANSFER, EXTENSION = "feynrl_gloo", "rollouts.engines.vllm_support.worker.WorkerMethods"
COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --generation-config vllm --logprobs-mode "
    f"""processed_logprobs --worker-extension-cls {EXTENSION} --weight-transfer-config '{{"backend": "{TRANSFER}"}}'"""
)
"""Command that starts a server for a policy, on a machine where FeynRL is installed."""
STOPS = {"stop": "eos", "length": "length"}


class HttpEngine(Engine):
    """Client of a server. Its processes are the server's, and outlive the run."""

    capabilities = Capabilities(tensor_parallel=True, broadcast=True, chunks=True, deltas=True, file_names=True)

    def __init__(self, config: EngineConfig) -> None:
        """Check the server. Raises UserError if its settings differ from the recipe's."""
        import httpx

        if config.server is None:
            raise UserError("rollout.engine is http, and rollout.servers has no address: add one for each engine")
        if config.pause_mode == "abort":
            raise UserError("weight_sync.pause_mode is abort, and rollout.engine is http: set it to keep or wait")
        self.config, self.address, self._takes_chunks = config, config.server.rstrip("/"), False
        try:
            answer = httpx.get(f"{self.address}/server_info?config_format=json", timeout=config.timeout_s)
        # InvalidURL: a port that is no number
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"rollout.servers: {self.address} does not answer: {name_error(error)}") from error
        if answer.status_code != 200:
            raise self._refuse("does not tell its settings")
        self._check_answer(answer.text)
        # no limits: requests wait in the server, and rollout.timeout_s is the deadline of a group
        # an idle connection ends before the server's 5 s, or a request would meet its end
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
        self._http = httpx.AsyncClient(base_url=self.address, timeout=None, limits=limits)

    def _check_answer(self, text: str) -> None:
        """Raise UserError if the answer of a server is not that of vLLM with the recipe's settings."""
        try:
            self._check_settings(decode_json(text)["vllm_config"])
        # of another server, or another vLLM
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refuse("does not tell its settings as vLLM does") from error

    def _check_settings(self, found: Mapping[str, Any]) -> None:
        config, model, parallel = self.config, found["model_config"], found["parallel_config"]
        wanted = {
            "logprobs-mode": (model["logprobs_mode"], "processed_logprobs"),
            "generation-config": (model["generation_config"], "vllm"),
            "dtype": (str(model["dtype"]).removeprefix("torch."), config.dtype),
            "tensor-parallel-size": (parallel["tensor_parallel_size"], config.tensor_parallel_size),
            "data-parallel-size": (parallel["data_parallel_size"], 1),
            "pipeline-parallel-size": (parallel["pipeline_parallel_size"], 1),
        }
        if config.starts_empty:  # weights will come
            transfer = (found.get("weight_transfer_config") or {}).get("backend")
            wanted |= {
                "worker-extension-cls": (parallel["worker_extension_cls"], EXTENSION),
                "weight-transfer-config": (transfer, TRANSFER),
            }
        else:  # its own weights stay; the folder may be elsewhere on its machine
            wanted["model"] = (PurePath(model["model"]).name, PurePath(config.model_path).name)
        for name, (there, ours) in wanted.items():
            if there != ours:
                raise self._refuse(f"has --{name} {there!r} where {ours!r} is needed")
        if model["max_model_len"] < config.max_model_len:
            raise self._refuse(f"has --max-model-len {model['max_model_len']}, and {config.max_model_len} is needed")

    def _refuse(self, why: str) -> UserError:
        return UserError(f"rollout.servers: {self.address} {why}: start it with {COMMAND}")

    async def generate(
        self, token_ids: list[int], *, max_new_tokens: int, seed: int, images: Sequence[PlacedImage] = ()
    ) -> Completion:
        params = {
            "temperature": self.config.temperature,
            "max_tokens": max_new_tokens,
            "seed": seed % 2**63,
            "logprobs": 0,  # of the sampled token only
            "stop_token_ids": [*self.config.stop_token_ids],
            "ignore_eos": True,  # the caller's stop tokens are complete
            "detokenize": False,
        }
        answer = await self._generate(token_ids, params)
        [choice] = answer["choices"]
        if choice["finish_reason"] not in STOPS:
            raise RunStopped(f"{self.address} ended a request with {choice['finish_reason']!r} instead of a completion")
        logp = [token["logprob"] for token in choice["logprobs"]["content"]]
        if not self.config.starts_empty and any(span["version"] != "default" for span in choice["weight_versions"]):
            raise RunStopped(
                f"rollout.servers: {self.address} has weights of a run in place of model.path: start it again"
            )
        versions = [
            UNPUBLISHED if span["version"] == "default" else int(span["version"])
            for span in choice["weight_versions"]
            for _ in range(span["start"], span["end"])
        ]
        return make_completion(choice["token_ids"], logp, versions, [], stop=STOPS[choice["finish_reason"]])

    async def probe(self, token_ids: list[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._generate(token_ids, params | {"skip_reading_prefix_cache": True})
        found = answer["prompt_logprobs"]
        return [found[i][str(token_ids[i])]["logprob"] for i in range(1, len(token_ids))]

    async def _generate(self, token_ids: list[int], params: Mapping[str, Any]) -> dict[str, Any]:
        return await self._post("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})

    async def join_broadcast(self, *, address: str, port: int, first_rank: int, members: int) -> None:
        self._takes_chunks = False
        where = {"address": address, "port": port, "first_rank": first_rank, "members": members}
        raise_first(await self._rpc("feynrl_join", init_info={**where, "timeout_s": self.config.timeout_s}))

    async def pause(self) -> None:
        await self._post("/pause", params={"mode": self.config.pause_mode, "clear_cache": False})

    async def load_weights(self, version: int, buckets: Iterable[Bucket]) -> None:
        raise UserError("rollout.engine is http, and backend is local, where no trainer sends weights: set it to ray")

    async def begin_chunks(self) -> None:
        self._takes_chunks = True
        await self._rpc("feynrl_begin", adapter=False)

    async def load_chunk(self, chunk: Chunk) -> None:
        # the server reads an object itself; JSON has no bytes
        await self._load_part({"chunk": chunk} if isinstance(chunk, str) else {"encoded": b64encode(chunk).decode()})

    async def _load_part(self, update_info: Mapping[str, Any]) -> None:
        """Load a part of an update, a vllm_support.worker.WeightUpdate."""
        raise_first(await self._rpc("feynrl_load_part", adapter=False, update_info=update_info))

    async def receive_weights(self, version: int) -> None:
        """Let the server's processes receive a broadcast, if no chunks have come, then sample from the weights."""
        if not self._takes_chunks:
            await self._rpc("feynrl_begin", adapter=False)
            await self._load_part({})
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        for rank, untouched in enumerate(await self._rpc("feynrl_untouched")):
            if untouched:
                raise RunStopped(
                    f"the sync of version {version} had no values for {len(untouched)} parameters of rank {rank} of "
                    f"{self.address}, such as {untouched[0]}"
                )
        cleared = await self._post("/reset_prefix_cache", params={"reset_running_requests": True})
        if not cleared["success"]:
            raise RunStopped(f"{self.address} did not clear its prefix cache for version {version}")
        await self._post("/resume")

    async def read_fingerprint(self) -> list[Mapping[str, int]]:
        return await self._rpc("feynrl_consumed")

    async def close(self) -> None:
        await self._http.aclose()

    async def _rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every process of the server. Return one result per rank."""
        # longer than the deadline inside the call, which raises the more precise error
        async with asyncio.timeout(self.config.timeout_s + ENGINE_RPC_GRACE_S):
            return (await self._post("/collective_rpc", {"method": method, "kwargs": kwargs}))["results"]

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, params: Any = None) -> dict[str, Any]:
        """Return the answer to a request. Raises ProcessDied if the server is gone, RunStopped if it refuses."""
        import httpx

        try:
            answer = await self._http.post(path, json=body, params=params)
        except httpx.HTTPError as error:
            raise ProcessDied(f"rollout.servers: {self.address} does not answer: {name_error(error)}") from error
        if answer.status_code != 200:
            raise RunStopped(f"{self.address} answered {path} with {answer.status_code}: {shorten(answer.text)}")
        try:
            return decode_json(answer.text)
        except ValueError as error:
            raise RunStopped(f"{self.address} answered {path} with no JSON: {shorten(answer.text)}") from error
