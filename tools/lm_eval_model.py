"""FeynRL's trainer and engines as a model of lm_eval, the evaluation harness (https://github.com/EleutherAI/lm-evaluation-harness).

Log-likelihoods are the trainer's, texts are an engine's. Text becomes tokens by the harness's rules, which add the
special tokens that the tokenizer adds. tools/lm_eval.py is the command; from Python pass
`simple_evaluate(model=FeynRLModel("runs/..."), ...)`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from configs.eval_schema import EvalModelConfig
from configs.trainer_schema import ModelConfig
from core.errors import UserError, quote
from data_feeds.chat.tokenizer import ChatTokenizer
from driver.evaluation.suites.likelihood import LikelihoodScorer
from driver.evaluation.suites.texts import TextRequest, choose_engine, generate_texts
from modeling.hf_config import check_model_folder, max_positions
from modeling.merge import check_adapter, merge_adapter
from rollouts.engines.base import EngineConfig
from rollouts.episode import make_seed
from tools.lm_eval_requests import Asked, read_request
from tools.speaker import find_model

NAME = "feynrl"
"""Name of the model in lm_eval's registry."""
LONGEST = 2048
"""Tokens of a text, where the model's config does not say how many it takes."""


@register_model(NAME)
class FeynRLModel(TemplateLM):
    """Model of a run, an adapter or the hub. Scorer and engine are never in memory at the same time."""

    def __init__(
        self,
        model: str,
        *,
        engine: str = "hf",
        dtype: str | None = None,
        max_length: int | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.85,
        trust_remote_code: bool = False,
        **of_harness: Any,
    ):
        """Take a run, model, adapter or checkpoint folder, or a name on the hub, as tools/speaker.py does.

        engine: of the texts, which are sampled with torch's seed, as lm_eval sets it. dtype: bfloat16 or float32; by
        default that of the run. of_harness: what lm_eval gives every model and means nothing here (batch size, device).
        """
        super().__init__()
        self.found = find_model(str(model), trust_remote_code=trust_remote_code)
        trusts: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        check_model_folder(self.found.base, key="--model", **trusts)
        usual = "bfloat16" if torch.cuda.is_available() else "float32"
        self.dtype: Any = dtype or self.found.get("model", "dtype", usual)
        self.trusts = trust_remote_code
        self.chat = ChatTokenizer(self.found.folder, "plain", key="--model", **trusts)
        self.tokenizer = self.chat.hf
        room = max_positions(self.found.base, **trusts)
        self.max_length = max_length or room or LONGEST
        if room is not None and self.max_length > room:
            raise UserError(f"--max_length={max_length}: the model has room for {room} tokens")
        self.engine_name = engine
        self.engine = choose_engine(engine, tensor_parallel_size=tensor_parallel_size)
        self.ranks, self.gpu_memory_utilization = tensor_parallel_size, gpu_memory_utilization
        self.folder = self._merge_adapter()
        self._scorer: LikelihoodScorer | None = None

    def _merge_adapter(self) -> str:
        """Return a folder with the whole model, which for an adapter is a temporary one."""
        if self.found.folder == self.found.base:
            return self.found.base
        check_adapter(self.found.folder, key="--model")
        self._temporary = TemporaryDirectory(prefix="feynrl-merged-")
        merged = Path(self._temporary.name) / "model"
        base = EvalModelConfig(path=self.found.base, dtype=self.dtype, trust_remote_code=self.trusts)
        merge_adapter(base, self.found.folder, merged)
        return str(merged)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.found.folder.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes into its results."""
        return {"model_folder": self.found.folder, "model_dtype": self.dtype, "engine": self.engine_name}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Return the tokens of a text; by default with the special ones that the tokenizer adds, unless it has them."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, with the run's system prompt and template arguments."""
        system = self.found.get("data", "system_prompt", None)
        if system and not any(turn["role"] == "system" for turn in chat_history):
            chat_history = [{"role": "system", "content": system}, *chat_history]
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.found.get("data", "template_args", {}),
        )

    def _loglikelihood_tokens(self, requests: Sequence[Any], **how: Any) -> list[tuple[float, bool]]:
        pairs = [self._fit_pair(texts, context, continuation) for texts, context, continuation in requests]
        if self._scorer is None:
            kind: dict[str, Any] = {"dtype": self.dtype, "trust_remote_code": self.trusts}
            self._scorer = LikelihoodScorer(ModelConfig(path=self.folder, **kind))
        found = [(0.0, False)] * len(pairs)
        scored = self._scorer.score(pairs)
        for i, one in tqdm(scored, total=len(pairs), desc="log-likelihoods", disable=how.get("disable_tqdm", False)):
            found[i] = one.logp, one.is_greedy
            if requests[i][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return found

    def _fit_pair(self, texts: Any, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return both without the beginning of a context that is too long."""
        if not continuation:
            raise UserError(f"a task asks for the likelihood of {quote(texts[1])}, which has no tokens of its own")
        if len(continuation) > self.max_length:
            raise UserError(
                f"a task asks for the likelihood of {len(continuation)} tokens, and the model has room for "
                f"{self.max_length}"
            )
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, each in windows that the model has room for."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            cut = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, (logp, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm), strict=True):
            sums[i] += logp
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the replies. Requests with one temperature and the same ends share an engine."""
        self._scorer = None
        gc.collect()
        torch.cuda.empty_cache()
        by_setting: dict[tuple[float, tuple[str, ...]], list[int]] = {}
        asked = [read_request(*request.args) for request in requests]
        for i, one in enumerate(asked):
            by_setting.setdefault((one.temperature, one.ends), []).append(i)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="replies", disable=disable_tqdm) as shown:
            for (temperature, ends), chosen in by_setting.items():
                todo = [self._make_request(asked[i], i) for i in chosen]
                replies = asyncio.run(
                    generate_texts(
                        self.engine,
                        self._configure(temperature, todo),
                        self.chat,
                        todo,
                        ends=ends,
                        on_text=shown.update,
                    )
                )
                for i, reply in zip(chosen, replies, strict=True):
                    texts[i] = reply
                    self.cache_hook.add_partial("generate_until", requests[i].args, reply)
        return texts

    def _make_request(self, asked: Asked, number: int) -> TextRequest:
        room = self.max_length - asked.max_new_tokens
        if room < 1:
            raise UserError(
                f"a task asks for {asked.max_new_tokens} tokens (max_gen_toks), and the model has room for "
                f"{self.max_length} with the context: lower it with --gen_kwargs max_gen_toks=..."
            )
        context = self.tok_encode(asked.context)[-room:]
        seed = make_seed(torch.initial_seed(), number, 0, 0)
        return TextRequest(context=context, max_new_tokens=asked.max_new_tokens, seed=seed)

    def _configure(self, temperature: float, requests: Sequence[TextRequest]) -> EngineConfig:
        return EngineConfig(
            model_path=self.folder,
            temperature=temperature,
            max_model_len=max(len(one.context) + one.max_new_tokens for one in requests),
            stop_token_ids=(),
            dtype=self.dtype,
            trust_remote_code=self.trusts,
            tensor_parallel_size=self.ranks,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )
