"""Speed of a step: tokens per second, and the utilisation of the trainers' devices."""

from __future__ import annotations

from collections.abc import Mapping

from configs.schema import RLConfig, RunConfig
from core import metrics as names
from core.cluster.workers import Workers
from core.speed_metrics import MFU, TFLOPS, TOKENS_PER_S, TOKENS_PER_S_PER_DEVICE
from core.timing.phases import Phase, time_metric
from core.types.batch import RowLayout
from driver.start.devices import shares_devices
from trainers.trainer import Trainer
from trainers.utilization import Utilization


async def describe_trainers(trainers: Workers[Trainer], cfg: RunConfig) -> tuple[RowLayout, float]:
    """Return the layout of rows and the peak of a device in teraflops per second, as loaded trainers know them."""
    layout = await trainers.call_one(0, Trainer.describe_layout)
    meters = trainers.attribute("observers.utilization")
    return layout, await meters.call_one(0, Utilization.find_peak, cfg.model.dtype)


async def read_tflops(trainers: Workers[Trainer]) -> dict[str, float]:
    """Return the operations of the last step. They depend on how it was cut, and so are no metric of the trainer."""
    meters = trainers.attribute("observers.utilization")
    return {TFLOPS: await meters.call_one(0, Utilization.read_tflops)}


def measure_speed(
    cfg: RunConfig, metrics: Mapping[str, float], tokens: float, *, peak_tflops: float
) -> dict[str, float]:
    """Return the metrics of a step's speed. tokens: of the step. peak_tflops: of a trainer device, per second."""
    ranks = cfg.trainer.ranks if cfg.backend == "ray" else 1
    per_second = tokens / metrics[names.STEP_SECONDS]
    return {
        TOKENS_PER_S: per_second,
        TOKENS_PER_S_PER_DEVICE: per_second / count_devices(cfg, metrics, ranks),
        MFU: metrics[TFLOPS] / (metrics[time_metric(Phase.TRAIN)] * peak_tflops * ranks),
    }


def count_devices(cfg: RunConfig, metrics: Mapping[str, float], ranks: int) -> float:
    """Return the number of devices that a step was computed on."""
    if not isinstance(cfg, RLConfig) or cfg.backend == "local":
        return ranks
    of_engines = metrics[names.ROLLOUT_ENGINES] * cfg.rollout.tensor_parallel_size
    return max(ranks, of_engines) if shares_devices(cfg) else ranks + of_engines
