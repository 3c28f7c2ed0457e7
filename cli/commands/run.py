"""`hicache run`: options in, a plan, one simulated run, its logs in a folder.

What the contract names and this version can't do is refused here, by name; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.errors import INTERRUPTED, UNREADABLE, CliError, tell
from cli.folder import own_files, prepared, refuse_used
from cli.options import Json, OutDir, Overwrite, Plugins, Quiet

if TYPE_CHECKING:
    from hicache.config import Config
    from hicache.sim.world import Plan, Result
    from hicache.workload import Workload

# Option -> what works today; every other value of the contract is refused.
TODAY = {
    "--mode": ("sim",),
    "--model": ("none",),
    "--hicache-write-policy": ("write_through",),
    "--radix-eviction-policy": ("lru",),
    "--hicache-storage-backend": ("none",),
    "--meeting-guard": ("off",),
    "--trace": ("full", "off"),
    "--decode-steps": ("one", "all"),
}

# Open in this process besides the logs: streams, the workload, the lock, what Python itself holds.
OTHER_FILES_OPEN = 32


def run(
    out: OutDir,
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Mooncake-style JSONL(.gz).", show_default=False, readable=False),
    ] = None,
    agentic: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Seeded conversations, as conversations=6,rounds=8,output=32; also max-context, "
            "shared-prefix and seed. A small one when no workload is named.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only the first N requests.", show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", help="Requests in flight in a replica.")] = 8,
    cache_output: Annotated[
        bool | None,
        typer.Option(
            "--cache-output/--no-cache-output",
            help="Whether generated tokens enter the tree; on for --agentic, off for --workload.",
            show_default=False,
        ),
    ] = None,
    decode_steps: Annotated[
        str | None,
        typer.Option(
            metavar="one|all",
            help="Decode in one step, or one step a token; one for --workload, else all.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(metavar="none", help="Page tags instead of KV.")] = "none",
    dp: Annotated[int, typer.Option(metavar="N", help="Replicas.")] = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option(metavar="N", help="Context parallel size.")] = 1,
    tp: Annotated[int, typer.Option(metavar="N", help="Attention tensor parallel size.")] = 1,
    mode: Annotated[str, typer.Option(metavar="sim", help="All ranks in one thread.")] = "sim",
    page_size: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Tokens a page; a trace file's block size."),
    ] = 64,
    device_pages: Annotated[int, typer.Option(metavar="N", help="Pages on the device; 0 is no limit.")] = 0,
    host_pages: Annotated[int, typer.Option(metavar="N", help="Pages in host memory; 0 is no limit.")] = 0,
    hierarchical_cache: Annotated[
        bool,
        typer.Option(
            "--hierarchical-cache/--no-hierarchical-cache",
            help="Whether there is a host tier.",
        ),
    ] = True,
    hicache_write_policy: Annotated[
        str, typer.Option(metavar="write_through", help="When pages go to the host.")
    ] = "write_through",
    radix_eviction_policy: Annotated[
        str, typer.Option(metavar="lru", help="Which pages leave first.")
    ] = "lru",
    hicache_storage_backend: Annotated[
        str, typer.Option(metavar="none", help="The tier behind the host.")
    ] = "none",
    seed: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Of the schedule, and of --agentic unless it has its own."),
    ] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="seed:7 or list:0,2,1, as run.json has it.",
            show_default=False,
        ),
    ] = None,
    bug: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A wrong part on every rank. Repeatable.", show_default=False),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="alloc_fail:rank=2,pool=host,nth=5 or delay_done:rank=0,queue=write,op=1,steps=2. "
            "Repeatable.",
            show_default=False,
        ),
    ] = None,
    plugin: Plugins = None,
    meeting_guard: Annotated[
        str,
        typer.Option(metavar="off", help="Whether collectives carry their purpose."),
    ] = "off",
    trace: Annotated[str, typer.Option(metavar="full|off", help="Logs, or run.json only.")] = "full",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run the instrumented runtime in the simulator; one log a rank.

    Exits 0 when the run was made, also when its ranks hang: that is for check to say.
    """
    given = {
        "--mode": mode,
        "--model": model,
        "--hicache-write-policy": hicache_write_policy,
        "--radix-eviction-policy": radix_eviction_policy,
        "--hicache-storage-backend": hicache_storage_backend,
        "--meeting-guard": meeting_guard,
        "--trace": trace,
    }
    for option, value in given.items():
        refuse_later(option, value)
    if decode_steps is not None:
        refuse_later("--decode-steps", decode_steps)
    if workload is not None and agentic is not None:
        raise CliError("--workload and --agentic exclude each other", expected="one source of requests")
    if workload is not None and cache_output:
        raise CliError(
            "--cache-output with --workload: a trace file does not know the tokens of the answers",
            expected="--no-cache-output, or conversations from --agentic",
        )
    refuse_used(out, overwrite=overwrite)

    from hicache.config import Config
    from hicache.schedule import Schedule
    from hicache.sim.bugs import find_bugs
    from hicache.sim.faults import Fault, FaultPlan
    from hicache.sim.world import Plan
    from hicache.topology import Topology

    steps: Literal["one", "all"] = (
        "one" if (decode_steps or ("one" if workload else "all")) == "one" else "all"
    )
    config = Config(
        topology=Topology(dp=dp, pp=pp, cp=cp, tp=tp),
        page_size_tokens=page_size,
        device_pages=device_pages,
        host_pages=host_pages,
        hierarchical_cache=hierarchical_cache,
        concurrency=concurrency,
        cache_output=workload is None if cache_output is None else cache_output,
        decode_steps=steps,
        seed=seed,
    )
    faults = [Fault.parse(text, config.topology) for text in fault or ()]
    name, source = requests(config, workload, agentic, limit)
    plan = Plan(
        config=config,
        workload_name=name,
        workload=source,
        schedule=Schedule.parse(schedule) if schedule is not None else Schedule(seed=seed),
        faults=FaultPlan(faults),
        fault_texts=tuple(fault or ()),
        bug_names=tuple(bug or ()),
        wires=tuple(find_bugs(bug or ())),
    )
    planned = with_plugins(plan, plugin or ())
    return execute(planned, out, overwrite=overwrite, trace=trace, json=json, quiet=quiet)


def refuse_later(option: str, value: str) -> None:
    """Values that the contract names and this version can't do are an error, not a surprise.

    Raises:
        CliError: `value` is not among those that work today.
    """
    today = TODAY[option]
    if value not in today:
        raise CliError(f"{option} {value} is not supported yet", expected=" or ".join(today))


def requests(
    config: Config, workload: Path | None, agentic: str | None, limit: int | None
) -> tuple[str, Callable[[int], Workload]]:
    """The workload's name for run.json, and replica -> its requests.

    A trace is opened here, so that a file that can't be read is told before a folder is touched.
    """
    from hicache.agentic import Agentic, AgenticSpec
    from hicache.workload import TraceFile

    replicas = config.topology.dp
    if workload is not None:
        files = [
            TraceFile(workload, config.page_size_tokens, limit=limit, replica=replica, replicas=replicas)
            for replica in range(replicas)
        ]
        return f"file {workload}" + (f" limit={limit}" if limit else ""), lambda replica: files[replica]
    text = agentic or ""
    has_own_seed = any(part.startswith("seed=") for part in text.split(","))
    spec = AgenticSpec.parse(text if has_own_seed else f"{text},seed={config.seed}")

    def conversations(replica: int) -> Workload:
        return Agentic(spec, replica, replicas, limit)

    return f"agentic {spec.text()}" + (f" limit={limit}" if limit else ""), conversations


def with_plugins(plan: Plan, paths: Sequence[Path]) -> Plan:
    """The plan with a user's substitutions wired in after its bugs."""
    if not paths:
        return plan
    from dataclasses import replace

    from hicache.sim.bugs import load_plugin

    try:
        wires = [load_plugin(path) for path in paths]
    except OSError as error:
        raise CliError(f"--plugin {error.filename}: {error.strerror}") from None
    return replace(
        plan,
        bug_names=(*plan.bug_names, *(f"plugin {path}" for path in paths)),
        wires=(*plan.wires, *wires),
    )


def execute(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    trace: str = "full",
    json: bool = False,
    quiet: bool = False,
) -> int:
    """Run a plan into a folder that `refuse_used` has allowed, and show how it ended."""
    from cli.screens.run import ending, in_one_line, run_document
    from cli.theme import show, show_json

    result = record(plan, out, overwrite=overwrite, trace=trace, quiet=quiet)
    if result is None:
        return INTERRUPTED
    if json:
        show_json(run_document(plan, result, out))
    else:
        show(in_one_line(plan, result) if quiet else ending(plan, result, out, is_traced=trace == "full"))
    return 0


def record(
    plan: Plan, out: Path, *, overwrite: bool = False, trace: str = "full", quiet: bool = False
) -> Result | None:
    """Simulate; None when it was interrupted, and then the logs can be read up to that moment."""
    from cli.theme import progress_bar
    from hicache.errors import WorkloadError
    from hicache.sim.world import simulate

    if trace == "full":
        demand_open_files(plan.config.topology.world_size)
    try:
        with prepared(out, overwrite=overwrite), progress_bar("running", quiet=quiet) as progress:
            return simulate(plan, out=out, trace="full" if trace == "full" else "off", progress=progress)
    except KeyboardInterrupt:
        has_logs = any(file.suffix == ".jsonl" for file in own_files(out))
        tell(f"interrupted{f'; the logs up to here are in {out}' if has_logs else ''}")
        return None
    except WorkloadError as error:
        if trace == "full":
            raise CliError(str(error), code=UNREADABLE, hint=f"{out} has the logs up to there") from None
        raise


def demand_open_files(ranks: int) -> None:
    """Say no before any work is done when this process may not hold one log a rank open.

    Raises:
        CliError: names both numbers.
    """
    import resource

    from tracer.sinks import allow_open_files

    wanted = ranks + OTHER_FILES_OPEN
    allow_open_files(wanted)
    allowed, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        raise CliError(
            f"{ranks:,} ranks need {wanted:,} open files, one log each; the limit is {allowed:,}",
            hint=f"ulimit -n {wanted}, or --trace off",
        )
