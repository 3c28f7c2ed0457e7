"""`hicache run`: options in, a plan, one run in one of three modes, its logs in a folder.

What the contract names and this version can't do is refused here, by name; nothing is ignored.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from cli import watched
from cli.commands import run_options as opt
from cli.errors import INTERRUPTED, TERMINATED, UNREADABLE, CliError, tell
from cli.folder import own_files, prepared, refuse_used
from cli.options import Json, OutDir, Overwrite, Quiet, one_of

if TYPE_CHECKING:
    from hicache.config import (
        Config,
        EvictionPolicy,
        PrefetchPolicy,
        StorageBackend,
        StorageConfig,
        WritePolicy,
    )
    from hicache.job import Mode, Plan, PlanSpec, Progress, Result, Trace

# Open in this process besides the logs: streams, the workload, the lock, what Python itself holds.
OTHER_FILES_OPEN = 32


def run(
    context: typer.Context,
    out: OutDir,
    workload: opt.Workload = None,
    agentic: opt.AgenticText = None,
    limit: opt.Limit = None,
    concurrency: opt.Concurrency = 8,
    cache_output: opt.CacheOutput = None,
    decode_steps: opt.DecodeSteps = None,
    admin: opt.Admin = "",
    dp: opt.Dp = 1,
    pp: opt.Pp = 1,
    cp: opt.Cp = 1,
    tp: opt.Tp = 1,
    mode: opt.ModeName = "sim",
    timeout: opt.Timeout = 60.0,
    plan_out: opt.PlanOut = None,
    model: opt.Model = "none",
    meeting_guard: opt.MeetingGuard = "off",
    in_band_digest: opt.InBandDigest = False,
    page_size: opt.PageSize = 64,
    device_pages: opt.DevicePages = 0,
    host_pages: opt.HostPages = 0,
    hierarchical_cache: opt.HierarchicalCache = True,
    hicache_write_policy: opt.WritePolicy = "write_through",
    radix_eviction_policy: opt.EvictionPolicy = "lru",
    hicache_host_memory_mode: opt.HostMemoryMode = "cache",
    side_pools: opt.SidePools = "",
    side_pool_slots: opt.SidePoolSlots = 0,
    hicache_storage_backend: opt.StorageBackend = "none",
    storage_extra: opt.StorageExtra = "",
    prefetch_policy: opt.PrefetchPolicy = "timeout",
    retry_poll_interval: opt.RetryPollInterval = 8,
    retry_max_attempts: opt.RetryMaxAttempts = 8,
    external_linker: opt.ExternalLinker = False,
    chunked_prefill_size: opt.ChunkedPrefillSize = 0,
    enable_priority_scheduling: opt.PriorityScheduling = False,
    decode_reserve: opt.DecodeReserve = 100,
    enable_streaming_session: opt.StreamingSession = False,
    seed: opt.Seed = 1,
    schedule: opt.ScheduleText = None,
    bug: opt.Bugs = None,
    fault: opt.Faults = None,
    plugin: opt.Plugins = None,
    trace: opt.TraceMode = "full",
    trace_limit: opt.TraceLimit = 64 << 20,
    trace_age: opt.TraceAge = None,
    trace_share: opt.TraceShare = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run the instrumented runtime; one log for each lane of a rank.

    Exits 0 when the run was made, also when its ranks hang or die: that is for check to say.
    """
    sources = {name: str(getattr(context.get_parameter_source(name), "name", "")) for name in context.params}
    is_trace_known = trace in opt.CHOICES["--trace"][0]
    if not is_trace_known and sources.get("trace") == "ENVIRONMENT":
        one_of(f"HICACHE_TRACE={trace}:", trace, opt.CHOICES["--trace"][0])
    refuse_what_is_out(
        {
            "--mode": mode,
            "--model": model,
            "--decode-steps": decode_steps or "all",
            "--hicache-write-policy": hicache_write_policy,
            "--radix-eviction-policy": radix_eviction_policy,
            "--hicache-host-memory-mode": hicache_host_memory_mode,
            "--hicache-storage-backend": hicache_storage_backend,
            "--hicache-storage-prefetch-policy": prefetch_policy,
            "--meeting-guard": meeting_guard,
            "--trace": trace,
        },
        side_pools=listed(side_pools),
        flags={
            "--enable-streaming-session": enable_streaming_session,
            "--enable-unified-cache-external-linker": external_linker,
        },
    )
    refuse_contradictions(workload, agentic, cache_output=cache_output, mode=mode)
    has_host = "a host tier: not with --no-hierarchical-cache" if not hierarchical_cache else ""
    has_storage = "--hicache-storage-backend memory or file" if hicache_storage_backend == "none" else ""
    has_own_seed = workload is not None or "seed=" in (agentic or "")
    refuse_what_does_not_apply(
        {name for name, source in sources.items() if source == "COMMANDLINE"},
        {
            "host_pages": has_host,
            "hicache_write_policy": has_host,
            "side_pool_slots": "" if "mamba" in listed(side_pools) else "--side-pools mamba",
            "prefetch_policy": has_storage,
            "retry_poll_interval": has_storage,
            "retry_max_attempts": has_storage,
            "trace_limit": "" if trace == "ring" else "--trace ring",
            "trace_age": "" if trace == "ring" else "--trace ring",
            "trace_share": "" if mode != "sim" else "--mode threads or gloo",
            "timeout": "" if mode != "sim" or plan_out else "--mode threads or gloo, or --plan-out",
            "seed": "something to draw: --schedule and the requests are given"
            if schedule and has_own_seed
            else "",
        },
    )
    refuse_used(out, overwrite=overwrite)

    from hicache.config import Config
    from hicache.job import PlanSpec
    from hicache.topology import Topology

    storage, limits = storage_config(
        hicache_storage_backend,
        storage_extra,
        admin,
        prefetch_policy=prefetch_policy,
        retry_poll_interval=retry_poll_interval,
        retry_max_attempts=retry_max_attempts,
    )
    config = Config(
        topology=Topology(dp=dp, pp=pp, cp=cp, tp=tp),
        page_size_tokens=page_size,
        device_pages=device_pages,
        host_pages=host_pages,
        hierarchical_cache=hierarchical_cache,
        write_policy=cast("WritePolicy", hicache_write_policy),
        eviction_policy=cast("EvictionPolicy", radix_eviction_policy),
        storage=storage,
        concurrency=concurrency,
        cache_output=workload is None if cache_output is None else cache_output,
        decode_steps="one" if (decode_steps or ("one" if workload else "all")) == "one" else "all",
        # SGLang says -1 where nothing is cut.
        chunked_prefill_tokens=0 if chunked_prefill_size == -1 else chunked_prefill_size,
        decode_reserve_percent=decode_reserve,
        priority_scheduling=enable_priority_scheduling,
        side_pools=listed(side_pools),
        side_pool_slots=side_pool_slots,
        in_band_digest=in_band_digest,
        meeting_guard=meeting_guard == "on",
        seed=seed,
    )
    spec = PlanSpec(
        config,
        workload=str(workload or ""),
        agentic=agentic or "",
        limit=limit,
        schedule=schedule or "",
        faults=tuple(fault or ()),
        bugs=tuple(bug or ()),
        plugins=tuple(map(str, plugin or ())),
        commands=admin,
        storage_limits=limits,
    )
    plan = spec.plan()
    # Opened now, so that a file that can't be read is told before a folder is touched.
    for replica in range(dp):
        plan.workload(replica)
    share = trace_share / 100 if trace_share is not None else None
    how = How(cast("Mode", mode), cast("Trace", trace), (trace_limit, trace_age, share), timeout, spec)
    if plan_out is not None:
        return write_plan(spec, plan_out, out, how)
    return execute(plan, out, how, overwrite=overwrite, json=json, quiet=quiet)


@dataclass(frozen=True, slots=True)
class How:
    """In which mode a plan is run and what is kept of it.

    Attributes:
        trace_limits: the fields of `job.TraceLimits`.
        timeout_s: of a wait, outside of the simulator.
        spec: the plan in plain values; needed by processes.
    """

    mode: Mode = "sim"
    trace: Trace = "full"
    trace_limits: tuple[int, float | None, float | None] = (64 << 20, None, None)
    timeout_s: float = 60.0
    spec: PlanSpec | None = None

    @property
    def is_logged(self) -> bool:
        return self.trace in ("full", "ring")


def refuse_what_is_out(
    choices: Mapping[str, str], *, side_pools: Sequence[str], flags: Mapping[str, bool]
) -> None:
    """Values that the contract names and this version can't do are an error, not a surprise.

    Raises:
        CliError: names the option and what works today.
    """
    for option, value in choices.items():
        known, later = opt.CHOICES[option]
        one_of(option, value, known, later=later)
    for pool in side_pools:
        known, later = opt.CHOICES["--side-pools"]
        one_of("--side-pools", pool, known, later=later)
    for option, is_on in flags.items():
        if is_on:
            raise CliError(f"{option} is not supported yet", hint=f"without {option}")


def refuse_contradictions(
    workload: Path | None, agentic: str | None, *, cache_output: bool | None, mode: str
) -> None:
    """Options that exclude each other.

    Raises:
        CliError: names both.
    """
    if workload is not None and agentic is not None:
        raise CliError("--workload and --agentic exclude each other", expected="one source of requests")
    if workload is not None and cache_output:
        raise CliError(
            "--cache-output with --workload: a trace file does not know the tokens of the answers",
            expected="--no-cache-output, or conversations from --agentic",
        )
    if workload is not None and mode == "gloo" and is_pipe(workload):
        raise CliError(
            f"--workload {workload} with --mode gloo: a pipe can be read by one process only",
            expected="a file",
        )


# Where an option's name is not the parameter's.
OPTIONS = {
    "prefetch_policy": "--hicache-storage-prefetch-policy",
    "retry_poll_interval": "--hicache-storage-prefetch-retry-poll-interval",
    "retry_max_attempts": "--hicache-storage-prefetch-retry-max-attempts",
}


def refuse_what_does_not_apply(given: Collection[str], needs: Mapping[str, str]) -> None:
    """An option that was typed and would change nothing is a mistake.

    Args:
        given: parameters that were typed.
        needs: parameter -> what it needs and does not have, or "".
    Raises:
        CliError: names the option and what it needs.
    """
    for name, need in needs.items():
        if need and name in given:
            option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise CliError(f"{option} changes nothing here", expected=need)


def is_pipe(path: Path) -> bool:
    try:
        return path.is_fifo() or path.is_char_device()
    except OSError:
        # Whoever reads it says what is wrong with it.
        return False


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def storage_config(
    backend: str,
    extra: str,
    admin: str,
    *,
    prefetch_policy: str,
    retry_poll_interval: int,
    retry_max_attempts: int,
) -> tuple[StorageConfig, dict[str, Any]]:
    """The external tier, and the limits of its files.

    Raises:
        CliError, ConfigError: something is set or asked for that this backend does not have.
    """
    from hicache.config import StorageConfig
    from hicache.storage.extra import environment_config, extra_config
    from hicache.workload import parse_commands

    verbs = [command.verb for _, command in parse_commands(admin) if command.verb != "flush"]
    if backend == "none" and (verbs or extra):
        what = f"--admin {verbs[0]}" if verbs else "--hicache-storage-backend-extra-config"
        raise CliError(
            f"{what} without an external tier", expected="--hicache-storage-backend memory or file"
        )
    fields = extra_config(extra)
    limits = {name: fields.pop(name) for name in opt.LIMITS if name in fields}
    if backend == "file":
        # As in SGLang its environment wins over what is configured.
        fields.update(
            (name, value) for name, value in environment_config(os.environ).items() if name == "directory"
        )
    config = StorageConfig(
        backend=cast("StorageBackend", backend),
        attached=verbs[:1] != ["attach"],
        prefetch_policy=cast("PrefetchPolicy", prefetch_policy),
        retry_poll_interval=retry_poll_interval,
        retry_max_attempts=retry_max_attempts,
        **fields,
    )
    return config, limits


def write_plan(spec: PlanSpec, path: Path, out: Path, how: How) -> int:
    """The plan for processes that somebody else starts, and how."""
    from cli.theme import show

    try:
        path.write_text(spec.to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CliError(f"--plan-out {path}: {reason}", hint="another file") from None
    words = ["-m", "hicache.worker", "--plan", str(path), "--out", str(out), "--trace", how.trace]
    words += ["--timeout", f"{how.timeout_s:g}"]
    count = spec.config.topology.world_size
    show([shlex.join(["torchrun", "--nproc-per-node", str(count), *words])])
    return 0


def with_plugins(plan: Plan, paths: Sequence[Path]) -> Plan:
    """The plan with a user's substitutions wired in after its bugs."""
    if not paths:
        return plan
    from dataclasses import replace

    from hicache.sim.bugs import load_plugin

    return replace(
        plan,
        bug_names=(*plan.bug_names, *(f"plugin {path}" for path in paths)),
        wires=(*plan.wires, *(load_plugin(path) for path in paths)),
    )


def execute(
    plan: Plan,
    out: Path,
    how: How | None = None,
    *,
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> int:
    """Run a plan into a folder that `refuse_used` has allowed, and show how it ended."""
    from cli.screens.run import ending, in_one_line, lost_files, run_document
    from cli.theme import show, show_json

    how = how or How()
    result = record(plan, out, how, overwrite=overwrite, quiet=quiet)
    if result is None:
        return INTERRUPTED
    lost = lost_files(plan, result, out, is_traced=how.is_logged)
    if json:
        show_json(run_document(plan, result, out, mode=how.mode, lost=lost))
    elif quiet:
        show(in_one_line(plan, result))
    else:
        show(ending(plan, result, out, is_traced=how.is_logged, lost=lost))
    return 0


def record(
    plan: Plan, out: Path, how: How | None = None, *, overwrite: bool = False, quiet: bool = False
) -> Result | None:
    """Make the run; None when it was interrupted, and then the logs can be read up to that moment.

    Raises:
        typer.Exit: somebody ended it by SIGTERM.
    """
    from cli.theme import progress_bar
    from hicache.errors import WorkloadError
    from hicache.launch import TerminatedError

    how = how or How()
    if how.is_logged:
        demand_open_files(plan.config, how.mode)
    try:
        with (
            heeding_sigterm(),
            prepared(out, overwrite=overwrite),
            progress_bar("running", quiet=quiet) as progress,
        ):
            return run_in_mode(plan, out, how, progress)
    except KeyboardInterrupt as error:
        is_told = isinstance(error, TerminatedError)
        has_logs = any(".jsonl" in file.name for file in own_files(out))
        what = "stopped by SIGTERM" if is_told else "interrupted"
        tell(f"{what}{f'; the logs up to here are in {out}' if has_logs else ''}")
        if is_told:
            raise typer.Exit(TERMINATED) from None
        return None
    except WorkloadError as error:
        if how.is_logged:
            raise CliError(str(error), code=UNREADABLE, hint=f"{out} has the logs up to there") from None
        raise


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, but only once: the cleaning up takes a moment."""
    from hicache.launch import TerminatedError

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_in_mode(plan: Plan, out: Path, how: How, progress: Progress | None) -> Result:
    """One run where its mode says."""
    from hicache.job import TraceLimits

    limits = TraceLimits(*how.trace_limits)
    is_watched = how.mode != "sim" and watched.is_asked_for()
    if is_watched and not how.is_logged:
        tell(f"nothing is watched with --trace {how.trace}: --trace ring costs least")
        is_watched = False
    if how.mode == "gloo":
        from hicache.launch import WORKER, run_gloo

        assert how.spec is not None, "processes need a plan that can be written down"
        return run_gloo(
            how.spec,
            plan,
            out=out,
            trace=how.trace,
            trace_limits=limits,
            timeout_s=how.timeout_s,
            progress=progress,
            module=watched.MODULE if is_watched else WORKER,
            ahead=watched.AHEAD if is_watched else (),
            say=watched.Speaker(),
        )
    if how.mode == "threads":
        from hicache.threads import run_threads

        return run_threads(
            plan,
            out=out,
            trace=how.trace,
            trace_limits=limits,
            timeout_s=how.timeout_s,
            progress=progress,
            observe=watched.watching() if is_watched else None,
            say=watched.Speaker(),
        )
    from hicache.sim.world import simulate

    return simulate(plan, out=out, trace=how.trace, trace_limits=limits, progress=progress)


def demand_open_files(config: Config, mode: Mode) -> None:
    """Say no before any work is done when this process may not hold one log for each lane open.

    Raises:
        CliError: names both numbers.
    """
    import resource

    from hicache.rank import lane_names
    from tracer.sinks import allow_open_files

    # A process of its own has the logs of its rank only; this one has its three streams.
    ranks = config.topology.world_size
    each, what = (3, "three streams") if mode == "gloo" else (len(lane_names(config)), "one log")
    wanted = ranks * each + OTHER_FILES_OPEN
    allow_open_files(wanted)
    allowed, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        lanes = f" for each of {each} lanes" if each > 1 and mode != "gloo" else ""
        raise CliError(
            f"{ranks:,} ranks need {wanted:,} open files, {what} each{lanes}; the limit is {allowed:,}",
            hint=f"ulimit -n {wanted}, or --trace off",
        )
