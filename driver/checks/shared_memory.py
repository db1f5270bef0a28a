"""Memory plan of colocated trainers and engines (placement: colocate), checked before the start.

On a GPU each phase must fit by itself, and offloaded state must fit into the machine's memory. On a CPU everything
stays in the machine's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from configs.schema import RLConfig, RunConfig
from core.errors import UserError
from core.gpus import GIB
from driver.checks.memory_estimate import CUDA_GIB, GRAPHS_GIB, MemoryEstimate, find_gpu_gib, find_machine_gib
from driver.start.devices import find_cpu_cache_gib, judge_takes_turns, uses_gpus
from modeling.hf_config import ModelUnreadable, meta_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory needed at the same time, in GiB."""

    when: str
    parts: dict[str, float]
    place: str
    """Name of the memory: a GPU or the machine."""
    there: float
    """Size of that memory."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {gib:.2f}" for name, gib in self.parts.items() if gib)
        return f"{self.when} takes {self.total:.2f} GiB ({parts}) of the {self.there:.2f} GiB of {self.place}"


def plan_colocation(
    cfg: RLConfig, estimate: MemoryEstimate, *, gpu_gib: float | None, machine_gib: float
) -> list[Need]:
    """Return the memory of every phase, without activations. gpu_gib: None on a CPU or without a visible GPU."""
    trainers = cfg.trainer.ranks * estimate.per_rank
    # Colocated engines are of a fixed number, so the least is all.
    engines = cfg.rollout.least_engines * cfg.rollout.tensor_parallel_size
    judge = estimate_judge_gib(cfg) if judge_takes_turns(cfg) else 0.0
    n_judges = 0 if cfg.judge is None or not judge else cfg.judge.num_engines * cfg.judge.tensor_parallel_size
    of_machine = partial(Need, place="this machine", there=machine_gib)
    on_vllm, cache = cfg.rollout.engine.startswith("vllm"), find_cpu_cache_gib(cfg.rollout)
    if not uses_gpus(cfg):
        # on a CPU vLLM packs the weights for its kernels, beside what was loaded
        everything = {
            "trainers": trainers,
            "weights of the engines, twice" if on_vllm else "weights of the engines": (1 + on_vllm)
            * engines
            * estimate.per_engine,
            "caches": engines * cache if on_vllm else 0.0,
        }
        if cfg.judge is not None and n_judges:
            by_vllm = cfg.judge.engine.startswith("vllm")
            everything["judge"] = n_judges * ((1 + by_vllm) * judge + (cache if by_vllm else 0.0))
        return [of_machine(when="everything together", parts=everything)]
    # With sleep_mode=discard the engines' weights are not kept: the next sync sends all of them.
    away = {"trainers": trainers + cfg.trainer.ranks * estimate.buckets}
    if cfg.rollout.sleep_mode == "offload":
        away["weights of the engines"] = engines * estimate.per_engine
    if n_judges:
        away["weights of the judge"] = n_judges * judge
    needs = [of_machine(when="what is away from the GPUs", parts=away)]
    if gpu_gib is None:
        return needs
    of_gpu = partial(Need, place="a GPU", there=gpu_gib)
    # A weight sync needs the weights of both sides on the GPU at the same time.
    sending = {
        "weights of the trainer": estimate.weights,
        "weights of the engine": estimate.per_engine,
        # A bucket is received while the one before it is loaded.
        "two buckets": 2 * cfg.weight_sync.bucket_mib / 1024,
    }
    share = cfg.rollout.gpu_memory_utilization
    # What neither side gives back: CUDA in each process, and an engine's graphs.
    stays = {"CUDA": CUDA_GIB * (2 + bool(n_judges) if cfg.backend == "ray" else 1)}
    if on_vllm and not cfg.rollout.enforce_eager:
        stays["graphs of the engine"] = GRAPHS_GIB
    training = {"the trainer": estimate.per_rank, "DeepSpeed's buckets": estimate.buckets}
    judging = [of_gpu(when="judging", parts={"weights of the judge": judge} | stays)] if n_judges else []
    return [
        of_gpu(when="training", parts=training | stays),
        of_gpu(when="sending the weights", parts=sending | stays),
        Need(
            when="generating",
            parts={"weights of the engine": estimate.per_engine},
            place=f"a GPU that rollout.gpu_memory_utilization={share:g} leaves to it, its cache included",
            there=share * gpu_gib,
        ),
        *judging,
        *needs,
    ]


def estimate_judge_gib(cfg: RLConfig) -> float:
    """Return the weights of a rank of the judge's own engines, in GiB. Raises UserError for an unreadable model."""
    judge = cfg.judge
    assert judge is not None
    model = meta_model(judge.model, key="judge.model", trust_remote_code=False)
    held = 2 if cfg.model.dtype == "bfloat16" else 4
    return sum(p.numel() for p in model.parameters()) * held / judge.tensor_parallel_size / GIB


def check_colocation(cfg: RLConfig, estimate: MemoryEstimate) -> None:
    """Raise UserError, with numbers, if a phase of a colocated run does not fit."""
    if cfg.rollout.is_opponent_loaded:
        raise UserError(
            "placement is colocate, and rollout.opponent would keep the device while the trainer trains: leave it out, "
            "or set placement to separate"
        )
    refuse_tight(plan_colocation(cfg, estimate, gpu_gib=find_gpu_gib(), machine_gib=find_machine_gib()))


def refuse_tight(needs: list[Need]) -> None:
    """Raise UserError for the first need that exceeds its memory."""
    for need in needs:
        if need.total > need.there:
            raise UserError(
                f"placement is colocate, and {need}, without activations: take a smaller model, model.lora, "
                "model.dtype=bfloat16, a higher trainer.zero_stage or less rollout.kv_cache_gib, or set placement to "
                "separate"
            )


def describe_turns(cfg: RunConfig, estimate: MemoryEstimate) -> list[tuple[str, str]]:
    """Return the rows of --explain about shared devices; empty with separate devices."""
    if not isinstance(cfg, RLConfig) or cfg.placement == "separate":
        return []
    order = "the engines play all episodes of a step; the trainers train"
    if judge_takes_turns(cfg):
        order = "the engines play all episodes of a step; the judge scores them; the trainers train"
    try:
        needs = plan_colocation(cfg, estimate, gpu_gib=find_gpu_gib(), machine_gib=find_machine_gib())
    except ModelUnreadable as error:  # a judge that is made later
        return [("turns", order), ("shared in turns", f"unknown: {error}")]
    return [("turns", order), *(("shared in turns", str(need)) for need in needs)]
