"""All deadlines and grace periods; `docs/reference/deadlines.md` is generated from TABLE.

A deadline that depends on the work (training step, group, weight sync, reward) is a key of the recipe. A constant here
limits something that takes the same time in every run. Or it makes an outer wait longer than the inner wait, so that
the process that knows the reason reports first.
"""

from __future__ import annotations

from dataclasses import dataclass

ERROR_GRACE_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 10.0
ADDRESS_CHECK_TIMEOUT_S = 10.0
MEMBERSHIP_POLL_S = 5.0
PLACEMENT_TIMEOUT_S = 60.0
PLACEMENT_POLL_S = 1
HUB_TIMEOUT_S = 5.0
GPU_CHECK_TIMEOUT_S = 60.0  # eight GPUs that no process uses take seconds each to wake
IMPORT_TIMEOUT_S = 120.0
PROGRESS_EVERY_S = 10.0
STEP_PROGRESS_EVERY_S = 60.0
TRACKER_FINISH_TIMEOUT_S = 30.0
TRACKER_ABANDON_TIMEOUT_S = 1.0
# The engine's own shutdown must end within the driver's wait for it.
CLOSE_TIMEOUT_S = 20.0
# Shorter than SYNC_TIMEOUT_GRACE_S: the engine reports its workers before the driver gives up on the engine.
ENGINE_RPC_GRACE_S = 2.0
ENGINE_POLL_S = 0.5
ENGINE_DEATH_GRACE_S = 5.0
PARENT_POLL_S = 1.0
GUARDIAN_POLL_S = 1.0
# Longer than the guardian kills leftovers, so that the driver usually sees it end.
GUARDIAN_TIMEOUT_S = 15.0
LEFTOVER_KILL_S = 10.0
GROUP_TIMEOUT_GRACE_S = 5.0
SYNC_TIMEOUT_GRACE_S = 5.0
REWARD_START_TIMEOUT_S = 120.0
VLLM_IMPORT_TIMEOUT_S = 300.0
REWARD_EXIT_GRACE_S = 5.0
AGENT_START_TIMEOUT_S = 120.0
AGENT_END_TIMEOUT_S = 10.0
AGENT_CANCEL_TIMEOUT_S = 5.0
AGENT_REQUEST_TIMEOUT_S = 60.0
AGENT_HOST_POLL_S = 20.0
SERVER_CLOSE_GRACE_S = 0.05  # aiohttp takes 0 for no limit
# An int, because math-verify passes it to signal.alarm, which takes whole seconds.
MATH_VERIFY_TIMEOUT_S = 2
MCP_START_TIMEOUT_S = 60.0
OPENENV_CLOSE_TIMEOUT_S = 1.0
SANDBOX_POLL_S = 0.1
SANDBOX_EXIT_GRACE_S = 10.0
SANDBOX_CHECK_TIMEOUT_S = 30.0
SANDBOX_HTTP_GRACE_S = 60.0
SANDBOX_MARGIN_S = 2.0
BOX_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Row of the generated table."""

    waits_for: str
    length: str
    """Key of the recipe, or seconds."""
    after_it: str
    """Consequence of a missed deadline."""


def _seconds(constant: float) -> str:
    return f"{constant:g} s"


TABLE = (
    Deadline(
        waits_for="every call to a trainer rank or an engine: start, training step, checkpoint, save",
        length="`timeout_s`",
        after_it="the run stops; the sentence names the rank and the method",
    ),
    Deadline(
        waits_for="collectives between the trainer ranks",
        length="`timeout_s`",
        after_it="the run stops; the rank that died or hangs is named",
    ),
    Deadline(
        waits_for="one group with its rewards, per attempt; with `rollout.max_concurrency` one started episode",
        length="`rollout.timeout_s`",
        after_it="the group is retried once on another engine, then the run stops",
    ),
    Deadline(
        waits_for="the engine's own report of a group that timed out (not with `rollout.max_concurrency`)",
        length=f"`rollout.timeout_s` + {_seconds(GROUP_TIMEOUT_GRACE_S)}",
        after_it="the driver counts the group as timed out",
    ),
    Deadline(
        waits_for="the reward of one sample, or of one group for `score_group`",
        length="`reward.timeout_s`; plain functions of a row: times their number",
        after_it="the call ends, or the process of a plain function is killed, and the sample has no reward",
    ),
    Deadline(
        waits_for="one request to a judge (`reward.function: judge` or `rubric`)",
        length="`timeout_s` of its settings (60 s)",
        after_it="the request is repeated for `outage_s` of its settings (120 s), then the sample has no reward",
    ),
    Deadline(
        waits_for="math-verify: reading or comparing one answer (`reward.function: math_verify`)",
        length=_seconds(MATH_VERIFY_TIMEOUT_S),
        after_it="the completion counts as wrong",
    ),
    Deadline(
        waits_for="one call of a tool in an environment",
        length="`tool_timeout_s` of the environment's class (30 s)",
        after_it="the call is answered with a sentence that says so, and counted",
    ),
    Deadline(
        waits_for="an MCP server that an environment uses, to start and to list its tools",
        length=_seconds(MCP_START_TIMEOUT_S),
        after_it="the sample fails",
    ),
    Deadline(
        waits_for="an answer of a server of OpenEnv (`rollout.env: openenv`)",
        length="`timeout_s` of the environment's class (60 s)",
        after_it="the sample fails",
    ),
    Deadline(
        waits_for="such a server, to confirm that a session has ended",
        length=_seconds(OPENENV_CLOSE_TIMEOUT_S),
        after_it="the connection is closed",
    ),
    Deadline(
        waits_for="the next look at the memory and the files of code in the sandbox",
        length=_seconds(SANDBOX_POLL_S),
        after_it="it looks again, or kills the sandbox",
    ),
    Deadline(
        waits_for="a sandbox that was killed",
        length=_seconds(SANDBOX_EXIT_GRACE_S),
        after_it="the sample has no reward",
    ),
    Deadline(
        waits_for="the sandbox's first process, before a run that needs it",
        length=_seconds(SANDBOX_CHECK_TIMEOUT_S),
        after_it="the run is refused",
    ),
    Deadline(
        waits_for="the tests of one sample's code (`reward.function: code`)",
        length=f"`reward.settings.timeout_s`, at most `reward.timeout_s` - {_seconds(SANDBOX_MARGIN_S)}",
        after_it="the sandbox is killed; tests that have not passed by then have failed",
    ),
    Deadline(
        waits_for="a sandbox on another machine, beyond the time that the code has",
        length=_seconds(SANDBOX_HTTP_GRACE_S),
        after_it="the sample has no reward",
    ),
    Deadline(
        waits_for="podman, docker or apptainer (`rollout.env: harbor`): a start with its pull, a copy, or an end",
        length=_seconds(BOX_TIMEOUT_S),
        after_it="the sample has no reward",
    ),
    Deadline(
        waits_for="a reward process that loads its file, model included",
        length=_seconds(REWARD_START_TIMEOUT_S),
        after_it="the run stops",
    ),
    Deadline(
        waits_for="the import of vLLM that asks for an architecture (only with `model.trust_remote_code`)",
        length=_seconds(VLLM_IMPORT_TIMEOUT_S),
        after_it="the run does not start",
    ),
    Deadline(
        waits_for="a reward process that is ending",
        length=_seconds(REWARD_EXIT_GRACE_S),
        after_it="it is killed",
    ),
    Deadline(
        waits_for="the agent of one episode (`rollout.agent`)",
        length="`rollout.agent.timeout_s`; unset: nine tenths of `rollout.timeout_s`",
        after_it="it is cancelled or killed, and `on_timeout` decides on the reward",
    ),
    Deadline(
        waits_for="an agent's process with many episodes (`rollout.agent.serve`), to end one that was cancelled",
        length=_seconds(AGENT_CANCEL_TIMEOUT_S),
        after_it="the process is killed with its episodes, and another one started",
    ),
    Deadline(
        waits_for="the import of an agent's file (`rollout.agent.file`), in the process from which episodes fork",
        length=_seconds(AGENT_START_TIMEOUT_S),
        after_it="the run stops",
    ),
    Deadline(
        waits_for="a request of an agent's to be received, parsed and rendered",
        length=_seconds(AGENT_REQUEST_TIMEOUT_S),
        after_it="it is refused; the 200th refusal ends the episode",
    ),
    Deadline(
        waits_for="a machine of `rollout.agent.address` that is asked whether an episode has ended",
        length=f"{_seconds(AGENT_HOST_POLL_S)} + {_seconds(AGENT_END_TIMEOUT_S)}",
        after_it="the episode begins again on another machine if nothing was sampled yet, else it has failed",
    ),
    Deadline(
        waits_for="an agent's processes, which have been killed, to be gone",
        length=_seconds(AGENT_END_TIMEOUT_S),
        after_it="the run goes on; its guardian kills them again at the end",
    ),
    Deadline(
        waits_for="each step of a weight sync: forming the group, one bucket, loading, the probe",
        length="`weight_sync.timeout_s`",
        after_it="the transport has failed: the next one is tried, or the run stops",
    ),
    Deadline(
        waits_for="a call that does one step of a weight sync in another process",
        length=f"`weight_sync.timeout_s` + {_seconds(SYNC_TIMEOUT_GRACE_S)}",
        after_it="the run stops; the sentence names the process",
    ),
    Deadline(
        waits_for="vLLM's own workers, asked by the engine during a weight sync",
        length=f"`weight_sync.timeout_s` + {_seconds(ENGINE_RPC_GRACE_S)}",
        after_it="the call fails",
    ),
    Deadline(
        waits_for="running requests before new weights, with `weight_sync.pause_mode: wait`",
        length="`timeout_s`",
        after_it="the run stops",
    ),
    Deadline(
        waits_for="engines, or a judge, that go to sleep once their requests have ended, with `placement: colocate`",
        length="`timeout_s`",
        after_it="the run stops; the sentence names the engine and the turn",
    ),
    Deadline(
        waits_for="trainers that leave a shared device or return to it, and engines that wake there",
        length=f"`weight_sync.timeout_s` + {_seconds(SYNC_TIMEOUT_GRACE_S)}",
        after_it="the run stops; the sentence names the process and the turn",
    ),
    Deadline(
        waits_for="better reasons from other ranks, after the first error of a collective call",
        length=_seconds(ERROR_GRACE_S),
        after_it="the first error is reported",
    ),
    Deadline(
        waits_for="a sign of life of each process, after a call has failed",
        length=_seconds(HEALTH_CHECK_TIMEOUT_S),
        after_it="the process is reported as stopped or stuck",
    ),
    Deadline(
        waits_for="a place in the cluster for an engine above `rollout.num_engines.min`, or for one that left",
        length="as long as the run",
        after_it="it joins at a weight sync",
    ),
    Deadline(
        waits_for="engines to be `rollout.num_engines.min` again, after some died or left",
        length="`timeout_s`",
        after_it="the run stops",
    ),
    Deadline(
        waits_for="the groups of an engine whose machine is to go",
        length=f"`rollout.timeout_s` + {_seconds(GROUP_TIMEOUT_GRACE_S)}",
        after_it="it is ended, and the groups are generated again",
    ),
    Deadline(
        waits_for="the next look which machines of the cluster are to go, where engines come and go",
        length=_seconds(MEMBERSHIP_POLL_S),
        after_it="it looks again",
    ),
    Deadline(
        waits_for="a connection to `ray_address`; then the first answer of a gRPC server; then that of the cluster",
        length=_seconds(ADDRESS_CHECK_TIMEOUT_S),
        after_it="the run is refused",
    ),
    Deadline(
        waits_for="a Ray cluster that has no room yet for all trainer ranks and engines",
        length=f"{_seconds(PLACEMENT_TIMEOUT_S)}, at most `timeout_s`",
        after_it="the run is refused; the sentence counts what is missing",
    ),
    Deadline(
        waits_for="the next look whether it has, or whether the run was ended",
        length=_seconds(PLACEMENT_POLL_S),
        after_it="it looks again",
    ),
    Deadline(
        waits_for="the first answer of the Hugging Face hub, where a recipe names a model or data set of it",
        length=_seconds(HUB_TIMEOUT_S),
        after_it="what is cached is used, and a line says so; what is not cached is refused",
    ),
    Deadline(
        waits_for="the import of a file of yours (algorithm, reward, ...) in the main thread, breakpoints not counted",
        length=_seconds(IMPORT_TIMEOUT_S),
        after_it="the run is refused; the sentence names the file and the line",
    ),
    Deadline(
        waits_for="the next line of progress, while rows are read or such a file is imported",
        length=_seconds(PROGRESS_EVERY_S),
        after_it="the line is printed",
    ),
    Deadline(
        waits_for="the next line on the progress within a step, where the output is no terminal",
        length=_seconds(STEP_PROGRESS_EVERY_S),
        after_it="the line is printed",
    ),
    Deadline(
        waits_for="trackers (`trackers`) that take what is left at the end of a run, all together",
        length=_seconds(TRACKER_FINISH_TIMEOUT_S),
        after_it="the run ends; a line says how many steps a tracker did not get",
    ),
    Deadline(
        waits_for="a tracker that failed or hangs, to let go of its own processes",
        length=_seconds(TRACKER_ABANDON_TIMEOUT_S),
        after_it="the run ends without it",
    ),
    Deadline(
        waits_for="engines that close at the end of a run",
        length=_seconds(CLOSE_TIMEOUT_S),
        after_it="their processes are killed",
    ),
    Deadline(
        waits_for="vLLM's report that one of its processes died, after a call that failed for no known reason",
        length=_seconds(ENGINE_DEATH_GRACE_S),
        after_it="the call's own error is raised",
    ),
    Deadline(
        waits_for="the next look for that report",
        length=_seconds(ENGINE_POLL_S),
        after_it="it looks again",
    ),
    Deadline(
        waits_for="the next look of a vLLM process whether its parent is alive",
        length=_seconds(PARENT_POLL_S),
        after_it="it looks again, or ends itself",
    ),
    Deadline(
        waits_for="the next look of a run's guardian whether the driver is alive, besides the pipe between them",
        length=_seconds(GUARDIAN_POLL_S),
        after_it="it looks again, or kills what the run has started",
    ),
    Deadline(
        waits_for="CUDA and nvidia-smi, each asked once before a run or an install",
        length=_seconds(GPU_CHECK_TIMEOUT_S),
        after_it="the run or the install ends with a sentence",
    ),
    Deadline(
        waits_for="processes of a run whose driver has ended, killed again and again by its guardian",
        length=_seconds(LEFTOVER_KILL_S),
        after_it="the guardian removes the run's temporary folder and ends",
    ),
    Deadline(
        waits_for="the guardian, at the end of a run",
        length=_seconds(GUARDIAN_TIMEOUT_S),
        after_it="the run ends without it; the guardian continues by itself",
    ),
)
