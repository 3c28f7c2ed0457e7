"""The options of `hicache run`, each with one name and one help text, grouped as its help shows them.

Names and defaults are SGLang's where SGLang has the option. What the contract names and this version can't
do is an option as well, so that it is refused by name and not as a typing mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import a_path

REQUESTS = "Requests"
RANKS = "Ranks"
CACHE = "Device and host"
STORAGE = "External tier"
SCHEDULING = "Scheduling"
CHANCE = "Chance, and what goes wrong"
RECORDING = "Recording"

# Option -> what works today, and what the contract names beside it.
CHOICES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "--mode": (("sim", "threads", "gloo"), ()),
    "--model": (("none",), ("tiny-mha", "tiny-gqa", "tiny-mla", "tiny-dsa", "tiny-hybrid")),
    "--decode-steps": (("one", "all"), ()),
    "--hicache-write-policy": (("write_through", "write_through_selective", "write_back"), ()),
    "--radix-eviction-policy": (
        ("lru", "lfu", "fifo", "filo", "mru", "priority", "slru", "tlru"),
        (),
    ),
    "--hicache-host-memory-mode": (("cache",), ("buffer_only",)),
    "--hicache-storage-backend": (
        ("none", "memory", "file"),
        ("redis", "dynamic", "mooncake", "hf3fs", "nixl", "aibrix", "eic", "simm", "shm"),
    ),
    "--hicache-storage-prefetch-policy": (("best_effort", "wait_complete", "timeout"), ()),
    "--side-pools": (("draft", "indexer", "mamba"), ("swa", "auxiliary_swa", "c128")),
    "--meeting-guard": (("on", "off"), ()),
    "--trace": (("full", "ring", "off"), ()),
}

# Keys of the extra config that bound the files of a store.
LIMITS = ("max_size_bytes", "eviction_ratio", "min_free_bytes")


def _option(*names: str, panel: str, metavar: str | None = None, help: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def _choice(name: str, *, panel: str, help: str, **more: Any) -> Any:
    return _option(name, panel=panel, metavar="|".join(CHOICES[name][0]), help=help, **more)


Workload = Annotated[
    Path | None,
    _option(
        panel=REQUESTS, metavar="FILE", help="Mooncake-style JSONL(.gz).", show_default=False, parser=a_path
    ),
]
AgenticText = Annotated[
    str | None,
    _option(
        panel=REQUESTS,
        metavar="SPEC",
        help="Seeded conversations, as conversations=6,rounds=8,output=32; also max-context, shared-prefix, "
        "seed, aborts, priorities, namespaces and think. A small one when no workload is named.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    _option(panel=REQUESTS, metavar="N", help="Only the first N requests.", min=1, show_default=False),
]
Concurrency = Annotated[int, _option(panel=REQUESTS, metavar="N", help="Requests in flight in a replica.")]
CacheOutput = Annotated[
    bool | None,
    _option(
        "--cache-output/--no-cache-output",
        panel=REQUESTS,
        help="Whether generated tokens enter the tree; on for --agentic, off for --workload.",
        show_default=False,
    ),
]
DecodeSteps = Annotated[
    str | None,
    _choice(
        "--decode-steps",
        panel=REQUESTS,
        help="Decode in one step, or one step a token; one for --workload, else all.",
        show_default=False,
    ),
]
Admin = Annotated[
    str,
    _option(
        panel=REQUESTS,
        metavar="LIST",
        help="An operator's commands at polls of the front door, as attach@40,detach@90,flush@120. With "
        "attach before any detach, the run starts without its external tier.",
        show_default=False,
    ),
]

Dp = Annotated[int, _option(panel=RANKS, metavar="N", help="Replicas.")]
Pp = Annotated[int, _option(panel=RANKS, metavar="N", help="Pipeline stages.")]
Cp = Annotated[int, _option(panel=RANKS, metavar="N", help="Context parallel size.")]
Tp = Annotated[int, _option(panel=RANKS, metavar="N", help="Attention tensor parallel size.")]
ModeName = Annotated[
    str,
    _choice(
        "--mode",
        panel=RANKS,
        help="All ranks simulated in one thread, a thread each, or a process each.",
    ),
]
Timeout = Annotated[
    float,
    _option(
        panel=RANKS,
        metavar="SECONDS",
        help="In threads and gloo, an older wait for another rank or for storage ends the run as hung.",
        min=0.1,
        max=86400,
    ),
]
PlanOut = Annotated[
    Path | None,
    _option(
        panel=RANKS,
        metavar="FILE",
        help="Write the plan for torchrun, say how to start it, and run nothing.",
        show_default=False,
        parser=a_path,
    ),
]
Model = Annotated[str, _choice("--model", panel=RANKS, help="Page tags instead of KV.")]
MeetingGuard = Annotated[
    str,
    _choice(
        "--meeting-guard",
        panel=RANKS,
        help="Collectives carry their purpose and number; the first that is paired wrongly ends the run.",
    ),
]
InBandDigest = Annotated[
    bool,
    _option(
        "--in-band-digest/--no-in-band-digest",
        panel=RANKS,
        help="The event round carries a running digest of all decisions; a fork ends the run in that round.",
    ),
]

PageSize = Annotated[
    int, _option(panel=CACHE, metavar="TOKENS", help="Tokens a page; a trace file's block size.")
]
DevicePages = Annotated[int, _option(panel=CACHE, metavar="N", help="Pages on the device; 0 is no limit.")]
HostPages = Annotated[int, _option(panel=CACHE, metavar="N", help="Pages in host memory; 0 is no limit.")]
HierarchicalCache = Annotated[
    bool,
    _option(
        "--hierarchical-cache/--no-hierarchical-cache", panel=CACHE, help="Whether there is a host tier."
    ),
]
WritePolicy = Annotated[
    str, _choice("--hicache-write-policy", panel=CACHE, help="When pages go to the host.")
]
EvictionPolicy = Annotated[
    str, _choice("--radix-eviction-policy", panel=CACHE, help="Which pages leave first.")
]
HostMemoryMode = Annotated[
    str, _choice("--hicache-host-memory-mode", panel=CACHE, help="The host as a tier.", hidden=True)
]
SidePools = Annotated[
    str,
    _option(
        panel=CACHE,
        metavar="LIST",
        help="Pools beside the KV pages: some of draft,indexer,mamba.",
        show_default=False,
    ),
]
SidePoolSlots = Annotated[
    int,
    _option(
        panel=CACHE,
        metavar="N",
        help="Host slots of a side pool that has its own (mamba); 0 is no limit.",
        min=0,
    ),
]

StorageBackend = Annotated[
    str, _choice("--hicache-storage-backend", panel=STORAGE, help="The tier behind the host.")
]
StorageExtra = Annotated[
    str,
    _option(
        "--hicache-storage-backend-extra-config",
        panel=STORAGE,
        metavar="JSON|@FILE",
        help='Its settings, as {"file_storage_path": "store", "prefetch_threshold": 256}.',
        show_default=False,
    ),
]
PrefetchPolicy = Annotated[
    str,
    _choice(
        "--hicache-storage-prefetch-policy",
        panel=STORAGE,
        help="When a read ahead that has not ended is cut short at admission.",
    ),
]
RetryPollInterval = Annotated[
    int,
    _option(
        "--hicache-storage-prefetch-retry-poll-interval",
        panel=STORAGE,
        metavar="N",
        help="Scheduling passes between a miss and its next try; 0 never tries again.",
        min=0,
    ),
]
RetryMaxAttempts = Annotated[
    int,
    _option(
        "--hicache-storage-prefetch-retry-max-attempts",
        panel=STORAGE,
        metavar="N",
        help="Tries of one request.",
        min=0,
    ),
]
ExternalLinker = Annotated[
    bool,
    _option(
        "--enable-unified-cache-external-linker",
        "--external-linker",
        panel=STORAGE,
        help="A cache that another process keeps.",
        hidden=True,
    ),
]

ChunkedPrefillSize = Annotated[
    int,
    _option(
        panel=SCHEDULING,
        metavar="TOKENS",
        help="Prompt tokens of one prefill batch; a longer prompt comes in chunks. 0 or -1 is no limit.",
    ),
]
PriorityScheduling = Annotated[
    bool,
    _option(
        "--enable-priority-scheduling", panel=SCHEDULING, help="A request's priority counts before its turn."
    ),
]
DecodeReserve = Annotated[
    int,
    _option(
        panel=SCHEDULING,
        metavar="PERCENT",
        help="Of its answer that a request has pages set aside for at admission; below 100 a decode may run "
        "out, and then somebody is retracted.",
    ),
]
StreamingSession = Annotated[
    bool,
    _option("--enable-streaming-session", panel=SCHEDULING, help="Sessions that keep their KV.", hidden=True),
]

Seed = Annotated[
    int,
    _option(
        panel=CHANCE,
        metavar="N",
        help="Of the schedule, and of --agentic unless it has its own.",
        min=0,
        max=999_999_999,
    ),
]
ScheduleText = Annotated[
    str | None,
    _option(
        panel=CHANCE, metavar="TEXT", help="seed:7 or list:0,2,1, as run.json has it.", show_default=False
    ),
]
Bugs = Annotated[
    list[str] | None,
    _option(
        "--bug",
        panel=CHANCE,
        metavar="NAME",
        help="A wrong part on every rank. Repeatable.",
        show_default=False,
    ),
]
Faults = Annotated[
    list[str] | None,
    _option(
        "--fault",
        panel=CHANCE,
        metavar="SPEC",
        help="As alloc_fail:rank=2,pool=host,nth=5; docs/commands.md has them all. Repeatable.",
        show_default=False,
    ),
]
Plugins = Annotated[
    list[Path] | None,
    _option(
        "--plugin",
        panel=CHANCE,
        metavar="FILE.py",
        help="A substitution of your own: Python with wire(parts). Repeatable.",
        show_default=False,
        parser=a_path,
    ),
]

TraceMode = Annotated[
    str,
    _choice(
        "--trace",
        panel=RECORDING,
        help="All logs, the newest of each rank, or run.json only.",
        envvar="HICACHE_TRACE",
    ),
]
TraceLimit = Annotated[
    int,
    _option(
        panel=RECORDING,
        metavar="BYTES",
        help="What a rank's logs may take under --trace ring.",
        envvar="HICACHE_TRACE_LIMIT",
        min=1 << 16,
    ),
]
TraceAge = Annotated[
    float | None,
    _option(
        panel=RECORDING,
        metavar="SECONDS",
        help="Under --trace ring, files that were closed longer ago go too.",
        show_default=False,
        min=1,
    ),
]
TraceShare = Annotated[
    float | None,
    _option(
        panel=RECORDING,
        metavar="PERCENT",
        help="Of the loop's time that recording may take; beyond, some steps are left out.",
        show_default=False,
        min=0.1,
        max=90,
    ),
]
