"""Registry of all metrics in metrics.jsonl: name, unit, meaning, and the runs that log each.

`docs/reference/metrics.md` is generated from METRICS, and a test compares METRICS with the logs of runs. A name in
angle brackets is a placeholder: <part> of the reward, <source> of a mixture, <n>.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from core.compile_metrics import COMPILE_METRICS
from core.draft_metrics import DRAFT_METRICS
from core.game_metrics import GAME_METRICS
from core.judge_metrics import JUDGE_METRICS
from core.metric import Metric as Metric
from core.metric import Unit
from core.route_metrics import ROUTE_METRICS
from core.speed_metrics import SPEED_METRICS
from core.sync_metrics import SYNC_METRICS
from core.timing.phases import (
    ENGINE_ACTIVITIES,
    ENGINE_TURNS,
    IDLE,
    REST,
    STEP,
    TRAINER_ACTIVITIES,
    TRAINER_TURNS,
    TURN_PHASES,
    Activity,
    Phase,
    time_metric,
)

METRICS: list[Metric] = []


def _declare(name: str, unit: Unit, meaning: str, logged_by: str) -> str:
    METRICS.append(Metric(name=name, unit=unit, meaning=meaning, logged_by=logged_by))
    return name


RL, SL, ALL = "RL", "supervised", "all runs"
_TOOLS, _AGENTS, _TURNS = "RL with tools", "RL with rollout.agent", "RL with placement: colocate"

STEP_NUMBER = _declare(
    "step", "steps", "number of the step, from 0: the steps behind the weights that it starts with, or is of", ALL
)

REWARD_MEAN = _declare("reward/mean", "", "mean reward over the episodes that have one", RL)
REWARD_STD = _declare("reward/std", "", "standard deviation of the rewards of the step", RL)
REWARD_LENGTH_CORR = _declare(
    "reward/length_corr", "", "correlation of reward and sampled tokens within groups; absent without a spread", RL
)
REWARD_MEAN_DRAWN = _declare(
    "reward/mean_drawn", "", "mean reward over all groups drawn for the step, rejected ones included", RL
)
REWARD_OTHERS = _declare(
    "reward/others", "", "mean reward of demonstrations and recorded episodes, which count in no other reward", RL
)
REWARD_PART = "reward/{}"
_declare("reward/<part>", "", "mean of one part of the reward, unweighted; or of the rewards of one data source", RL)

ROLLOUT_SAMPLES = _declare("rollout/samples", "samples", "samples that the step trains on", RL)
ROLLOUT_BRANCHES = _declare(
    "rollout/branches_per_episode", "", "samples per episode, mean; above 1 where a harness rewrites its history", RL
)
ROLLOUT_TRAINED = _declare(
    "rollout/trained_fraction", "fraction", "sampled tokens of the step that are trained on: not those of failures", RL
)
ROLLOUT_FAILED = _declare(
    "rollout/failed", "samples", "episodes without a reward, because reward or environment failed: not trained on", RL
)
ROLLOUT_TIMEOUTS = _declare(
    "rollout/timeouts", "samples", "episodes of the step that reached their deadline, failed or scored", _AGENTS
)
ROLLOUT_SLOW = _declare(
    "rollout/failed/slow", "samples", "episodes that failed at their deadline, with a policy mostly idle", _AGENTS
)
ROLLOUT_TOKENS = _declare("rollout/tokens", "tokens", "sampled tokens of the step", RL)
ROLLOUT_TOKENS_MEAN = _declare("rollout/tokens_mean", "tokens", "sampled tokens per episode, mean", RL)
ROLLOUT_TOKENS_MAX = _declare("rollout/tokens_max", "tokens", "sampled tokens per episode, maximum", RL)
ROLLOUT_TRUNCATED = _declare(
    "rollout/truncated_fraction", "fraction", "episodes that reached the token budget (rollout.max_new_tokens)", RL
)
ROLLOUT_GROUPS_DRAWN = _declare(
    "rollout/groups_drawn", "groups", "groups drawn for the step, those that dynamic_sampling rejected included", RL
)
ROLLOUT_WASTED = _declare(
    "rollout/wasted_fraction", "fraction", "sampled tokens of the step in rejected groups and failed samples", RL
)
ROLLOUT_ZERO_STD = _declare(
    "rollout/zero_std_groups", "fraction", "groups without two different rewards: they have no training signal", RL
)
ROLLOUT_STALENESS_MEAN = _declare(
    "rollout/staleness_mean", "steps", "step that trains on a token minus the version that sampled it, mean", RL
)
ROLLOUT_STALENESS_MAX = _declare("rollout/staleness_max", "steps", "staleness of the oldest token of the step", RL)
ROLLOUT_STALENESS = "rollout/staleness/{}"
_declare("rollout/staleness/<n>", "fraction", "tokens that are n steps old; with max_staleness above 0", RL)
ROLLOUT_MIXED_VERSIONS = _declare(
    "rollout/mixed_versions_fraction",
    "fraction",
    "samples during which new weights arrived; with max_staleness above 0",
    RL,
)
ROLLOUT_TURNS = _declare(
    "rollout/turns_mean", "turns", "replies of the policy per episode, mean; with rollout.max_turns above 1", RL
)
ROLLOUT_TOOL_CALLS = _declare("rollout/tool_calls_mean", "calls", "tool calls per episode, mean", _TOOLS)
ROLLOUT_TOOL_SECONDS = _declare(
    "rollout/tool_seconds_mean", "seconds", "seconds per episode in which it waited for tools, mean", _TOOLS
)
ROLLOUT_TOOL_ERRORS = _declare(
    "rollout/tool_errors", "fraction", "tool calls of the step that were answered with an error", _TOOLS
)
ToolErrorKind = Literal["unreadable", "unknown", "arguments", "raised", "timeout"]
"""Kinds of failed calls: it cannot be read, names no tool, has wrong arguments; its tool raised, or took too long."""
ROLLOUT_TOOL_ERROR = "rollout/tool_errors/{}"
_declare(
    "rollout/tool_errors/<kind>",
    "fraction",
    "tool calls of the step that could not be read, name no tool (unknown), have wrong arguments, or whose tool raised "
    "or took too long (timeout)",
    _TOOLS,
)
ROLLOUT_COUNT = "rollout/counts/{}"
_declare(
    "rollout/counts/<name>",
    "",
    "mean of a number that the environment counts (Env.counts); of an agent: its requests that were refused, retried, "
    "demanded a call, or could not be appended because the chat template writes earlier turns differently",
    RL,
)
ROLLOUT_REWRITTEN = _declare(
    "rollout/rewritten_fraction",
    "fraction",
    "replies in the agents' requests that are not the tokens that were sampled, because the harness has rewritten, "
    "inserted or moved them: context, and never trained on",
    _AGENTS,
)
ROLLOUT_KEPT = _declare(
    "rollout/kept_fraction",
    "fraction",
    "sampled tokens that are in samples; the others came after a stop string of the harness, or never reached it",
    _AGENTS,
)
ROLLOUT_SET_SIZE = _declare("rollout/kept_set_size_mean", "tokens", "ids that top-p, top-k and min-p left, mean", RL)
ROLLOUT_GROUP_RETRIES = _declare(
    "rollout/group_retries", "groups", "groups retried on another engine after a timeout (cumulative)", RL
)
ROLLOUT_ENGINES = _declare("rollout/engines", "", "engines that serve when the step ends", RL)
ROLLOUT_RESTARTS = _declare("rollout/engine_restarts", "", "engines that died and were restarted (cumulative)", RL)

METRICS.extend(JUDGE_METRICS)

DATA_ROWS = "data/{}/rows"
_declare("data/<source>/rows", "rows", "rows drawn from a source of a mixture so far", ALL)
DATA_EPOCH = "data/{}/epoch"
_declare("data/<source>/epoch", "", "rows drawn from a source so far, divided by the rows that it has", ALL)
_SAMPLED = "RL with data.sampler"
DATA_DRAWN_RATE = _declare(
    "data/drawn_pass_rate", "", "mean pass rate, before they were drawn, of the rows drawn for the step", _SAMPLED
)
DATA_GIVEN_RATE = _declare(
    "data/given_pass_rate", "", "mean pass rate of all rows with results, which equal draws would have", _SAMPLED
)
DATA_NEW = _declare("data/new_rows", "fraction", "rows drawn for the step that had no results yet", _SAMPLED)
DATA_EFFECTIVE = _declare(
    "data/effective_rows",
    "fraction",
    "rows of data.train that would give draws of the same concentration, all drawn equally often (Kish)",
    _SAMPLED,
)

TRAIN = "train/"
"""Prefix of a loss's own metrics."""
TRAIN_LOSS = _declare("train/loss", "", "loss, averaged with the token weights over micro-batches and ranks", ALL)
TRAIN_TOKENS = _declare("train/tokens", "tokens", "tokens of the step that are trained on", ALL)
TRAIN_LR = _declare("train/lr", "", "learning rate of the step's last update", ALL)
TRAIN_GRAD_NORM = _declare("train/grad_norm", "", "norm of the gradient before clipping, mean over the updates", ALL)
TRAIN_SKIPPED = _declare("train/updates_skipped", "", "updates without a finite gradient or a trained token", ALL)
TRAIN_PADDING = _declare(
    "train/padding", "fraction", "positions of the forward passes that hold no token; 0 with packed rows", ALL
)
TRAIN_SHARED = _declare(
    "train/shared", "fraction", "input tokens that were computed once for several samples of a group", ALL
)
_declare("train/loss/<source>", "", "loss on the rows of one source of a mixture", SL)
MISMATCH_KL = _declare(
    "train/mismatch/kl", "nats", "k3 estimate of KL(engine || trainer) on the sampled tokens, before the step", RL
)
_declare("train/mismatch/abs_logp", "nats", "mean absolute difference of log-probabilities, trainer and engine", RL)
_declare("train/mismatch/clamped", "fraction", "tokens whose log-ratio of two policies is clamped at 20", RL)
MISMATCH_RATIO = _declare(
    "train/mismatch/ratio", "", "mean importance weight pi_prox / pi_rollout before the correction", RL
)
MISMATCH_RATIO_SQ = "train/mismatch/ratio_sq"
"""Intermediate value, from which the driver computes MISMATCH_ESS."""
MISMATCH_ESS = _declare(
    "train/mismatch/ess",
    "fraction",
    "effective sample size of the importance weights, as a fraction of the tokens (Kish)",
    RL,
)
_declare("train/mismatch/weight", "", "mean importance weight after the correction", RL)
_declare("train/mismatch/drifted", "fraction", "tokens without a gradient by alg.correction.max_drift", RL)
METRICS.extend([*DRAFT_METRICS, *GAME_METRICS, *ROUTE_METRICS])
TRAIN_ENTROPY = _declare("train/entropy", "nats", "entropy of the policy, with alg.entropy_coef above 0", RL)
TRAIN_KL_REF = _declare(
    "train/kl_ref", "nats", "k3 estimate of KL(pi || reference) on the trained tokens, with a reference model", RL
)
_declare("train/kl_ref_capped", "fraction", "tokens whose k3 to the reference is beyond 10 nats: a straight line", RL)
_CLIPPED = "grpo, ppo, gspo, reinforce_pp, passk, qae, raft, clip_cov"
APPROX_KL = _declare("train/approx_kl", "nats", "estimate of KL(pi_prox || pi) on the trained tokens", _CLIPPED)
CLIP_FRACTIONS = (
    _declare("train/clip_frac_high", "fraction", "tokens whose gradient the upper clip bound removed", _CLIPPED),
    _declare("train/clip_frac_low", "fraction", "tokens whose gradient the lower clip bound removed", _CLIPPED),
)
CLIP_FRACTION = _declare("train/clip_frac", "fraction", "tokens whose ratio was clipped", "gmpo")
CAPPED = _declare("train/capped", "fraction", "tokens whose importance weight reached max_weight", "cispo")
MASKED = _declare("train/masked", "fraction", "tokens that a bound on the divergence masked", "dppo, erc, ipo_rl, opsd")
SILENCED = (*CLIP_FRACTIONS, CLIP_FRACTION, MASKED)
"""Metrics for the fraction of trained tokens without a gradient."""
CUT = (*SILENCED, CAPPED)
"""Metrics for the fraction of tokens that a loss clips, caps or masks."""
_declare("train/drift", "nats", "mean of log pi(a) minus the anchor's", "dro")
_declare("train/sequence_weight", "", "mean weight of the sequences; 1 on policy", "topr, vespo")
_declare("train/gate", "", "mean derivative of the sigmoid gate; 1 on policy", "sapo")
_declare("train/term/<term>/<what>", "", "loss, coef of a term", "by_source, chord, dpo_nll, echo, luffy, positive_nll")
_declare(
    "train/teacher_kl",
    "nats",
    "KL(pi || teacher), estimated on the sampled tokens or exact",
    "opd, opsd, sdpo, minillm",
)
_declare("train/penalised", "fraction", "tokens with a penalty on the size of their log-ratio", "kl_cov")
_declare("train/dropped", "fraction", "tokens that were dropped at random among the candidates", "clip_cov")
_declare("train/high_entropy", "fraction", "tokens whose entropy is at the quantile or above", "top_entropy")
_declare("train/tilt", "", "mean weight of the tokens by their loss; 1 if all tokens count the same", "tilted")
_STAGED = "kl_cov, clip_cov, top_entropy, tilted"
_declare("train/near_threshold", "fraction", "tokens within 1e-5 of a threshold, which rounding may move", _STAGED)
_declare("train/ess", "fraction", "effective sample size of the update", "p3o, p4o")
_declare("train/ess_prox", "fraction", "effective sample size against the proximal policy", "p4o")
_declare("train/value/loss", "", "loss of the value model", "ppo")
_declare("train/value/mean", "", "mean prediction of the value model", "ppo")
VALUE_RETURN = _declare("train/value/return", "", "mean target of the value model", "ppo")
VALUE_MOMENTS = ("train/value/return_sq", "train/value/error", "train/value/error_sq")
"""Intermediate values, from which the driver computes EXPLAINED_VARIANCE."""
EXPLAINED_VARIANCE = _declare(
    "train/value/explained_variance", "", "1 - Var(return - prediction) / Var(return); 0 for a constant", "ppo"
)
_declare("train/value/grad_norm", "", "norm of the value model's gradient before clipping", "ppo")
_PAIRS = "aot, dpo, wpo, orpo, reward_model"
_declare("train/pair/chosen", "", "implicit reward of the chosen completion", _PAIRS)
_declare("train/pair/rejected", "", "implicit reward of the rejected completion", _PAIRS)
_declare("train/pair/margin", "", "implicit reward of the chosen minus that of the rejected", _PAIRS)
_declare("train/pair/accuracy", "fraction", "pairs with a positive margin", _PAIRS)
_declare("train/pair/weight", "", "weight of a pair, by how likely the policy is to write it", "wpo")
_declare("train/nll", "nats", "negative log-likelihood of the chosen completion", "orpo")
_declare("train/odds_loss", "", "odds-ratio term of the loss", "orpo")
_declare("train/kto/z0", "", "KTO's reference point", "kto")
_declare("train/kto/accuracy", "fraction", "completions on the side of z0 that their label says", "kto")

_ON_SIDE = "completions whose log-ratio is on the side of the row's mean that their reward is on"
_declare("train/offline_dro/accuracy", "fraction", _ON_SIDE, "offline_dro")
_declare("train/bco/reward", "", "mean of beta times the log-ratio to the reference", "bco")
_declare("train/bco/accuracy", "fraction", "completions on the side of delta that their label says", "bco")
ALG_STATE, ALG_SCHEDULED = "alg/state/{}", "alg/{}"
_declare("alg/state/<name>", "", "number of the algorithm's state, as the step used it", "an algorithm with a state")
_declare("alg/<name>", "", "scheduled hyper-parameter, as the step used it", "alg.schedules")
COMPARE_LOSSES = "compare_losses/"
"""Prefix of a compared loss's metrics."""
_declare("compare_losses/<name>/<metric>", "", "train/<metric> of a loss that only watches, with compare_losses", RL)
_declare(
    "compare_losses/<name>/<group>/<metric>",
    "",
    "train/<group>/<metric> of a loss that only watches, with compare_losses",
    RL,
)

EVAL = "eval/{}"
EVAL_LOSS = _declare("eval/loss", "", "loss on data.eval", SL)
_declare("eval/nll", "nats", "train/nll on data.eval", "orpo")
_declare("eval/odds_loss", "", "train/odds_loss on data.eval", "orpo")
EVAL_PAIR_ACCURACY = _declare("eval/pair/<metric>", "", "train/pair/<metric> on data.eval", _PAIRS).replace(
    "<metric>", "accuracy"
)
_declare("eval/kto/<metric>", "", "train/kto/<metric> on data.eval", "kto")
_declare("eval/offline_dro/<metric>", "", "train/offline_dro/<metric> on data.eval", "offline_dro")
_declare("eval/bco/<metric>", "", "train/bco/<metric> on data.eval", "bco")
_declare("eval/reward/<part>", "", "reward/<part> on data.eval", RL)
_declare("eval/rollout/failed", "samples", "samples of data.eval without a reward", RL)
VERSION = "version"
_declare("eval/version", "steps", "steps that the evaluated weights have behind them", RL)
PASS_AT = "pass@{}"
_declare(
    "eval/pass@<k>", "fraction", "prompts of data.eval that k samples solve, unbiased; with eval_samples above 1", RL
)

METRICS.extend([*SYNC_METRICS, *SPEED_METRICS, *COMPILE_METRICS])

GROUP_SECONDS_MEAN = _declare("time/groups/mean_s", "seconds", "from a group's start to its last reward, mean", RL)
GROUP_SECONDS_STD = _declare("time/groups/std_s", "seconds", "standard deviation of the seconds of a group", RL)
PHASE_MEANINGS = {
    Phase.WAIT_FOR_DATA: "waiting for the groups of the step",
    Phase.CHECK: "checking them for failures and staleness",
    Phase.LOGP: "computing the columns that the algorithm requires",
    Phase.ADVANTAGES: "computing advantages",
    Phase.TRAIN: "packing and training",
    Phase.CAPTURE: "keeping the step, with capture",
    Phase.SYNC: "weight sync and its proof",
    Phase.SLEEP: "putting engines to sleep, so that the trainers have the device",
    Phase.RELOAD: "reloading the trainers to the device",
    Phase.OFFLOAD: "offloading the trainers, so that the engines have the device",
    Phase.WAKE: "waking the engines",
    Phase.EVALUATE: "measuring data.eval",
    Phase.LOG: "writing the step's samples and timers",
    Phase.CHECKPOINT: "writing a checkpoint (in the line of the next step)",
}
"""Phases that appear in the log; other phases lie before the first step or after the last."""
for _phase, _meaning in PHASE_MEANINGS.items():
    _declare(time_metric(_phase), "seconds", f"driver: {_meaning}", _TURNS if _phase in TURN_PHASES else ALL)
_declare(time_metric(REST), "seconds", "driver: what no phase explains", ALL)
STEP_SECONDS = _declare(time_metric(STEP), "seconds", "the whole step", ALL)
DEVICE_SECONDS = "time/{}s/{}_s"
for _activity in (*TRAINER_ACTIVITIES, IDLE):
    _declare(DEVICE_SECONDS.format("trainer", _activity), "seconds", f"mean trainer rank: {_activity}", RL)
for _activity in (*ENGINE_ACTIVITIES, IDLE):
    _declare(DEVICE_SECONDS.format("engine", _activity), "seconds", f"mean engine: {_activity}", RL)
for _kind, _activities in (("trainer", TRAINER_TURNS), ("engine", ENGINE_TURNS)):
    for _activity in _activities:
        _declare(DEVICE_SECONDS.format(_kind, _activity), "seconds", f"mean {_kind}: {_activity}", _TURNS)
_declare(DEVICE_SECONDS.format("engine", Activity.RESTART), "seconds", "mean engine: dead, or restarting", RL)
IDLE_FRACTION = "time/{}s/idle_fraction"
_declare(IDLE_FRACTION.format("trainer"), "fraction", "the mean trainer rank's time without work", RL)
ENGINE_IDLE = _declare(IDLE_FRACTION.format("engine"), "fraction", "the mean engine's time without work", RL)


def is_evaluation(line: Mapping[str, float]) -> bool:
    """Tell whether a line of metrics.jsonl is an evaluation's, and no step's."""
    return all(name == STEP_NUMBER or name.startswith(EVAL.format("")) for name in line)


def find_metric(name: str) -> Metric | None:
    """Return the declaration of a logged name; None if undeclared."""
    # An exact name wins: reward/mean also matches the placeholder reward/<part>.
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.matches(name)), None)
