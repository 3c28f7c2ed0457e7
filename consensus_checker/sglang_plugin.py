"""The entry point of SGLang's plugin group: makes a server's ranks record what they decide, and be compared.

Installed alone it does nothing. It is armed by SGLANG_ENABLE_RANK_CONSENSUS_CHECKER, or by HICACHE_TRACE with
`full` or `ring`; `off` beats everything. Only in a scheduler's process, and never so that the server fails by
it: what can't be armed is said once, and the server runs as if it were not there.

    load_plugins  ->  entry  ->  hooks in place, SGLang's checker answered for
    end of the scheduler's start  ->  configure(groups)  ->  a Session
    release of its resources      ->  shutdown()         ->  trailers
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consensus_checker.sglang_session import Hooks, Session

SCHEDULER = "sglang.srt.managers.scheduler"
CHECKER = "sglang.srt.utils.rank_consensus_checker"
SWITCH, TRACE = "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "HICACHE_TRACE"
ON = frozenset({"1", "true", "yes", "on", "y", "t"})
ARMING = frozenset({"ring", "full"})
# Names of arguments that a log's header has.
SETTINGS = (
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_io_backend",
    "hicache_host_memory_mode",
    "hicache_mem_layout",
    "hicache_storage_backend",
    "hicache_storage_prefetch_policy",
    "hicache_storage_prefetch_retry_poll_interval",
    "hicache_storage_prefetch_retry_max_attempts",
    "radix_eviction_policy",
    "chunked_prefill_size",
)

_hooks: Hooks | None = None
_session: Session | None = None
# How often this process has configured.
_number = 0


def entry() -> None:
    """What SGLang calls in each of its processes."""
    global _hooks
    if not is_asked_for() or SCHEDULER not in sys.modules or _hooks is not None:
        return
    try:
        _answer_for_checker()
        from consensus_checker.sglang_session import Hooks

        hooks = Hooks(tell)
        hooks.install(is_last=False)
        _hooks = hooks
        os.register_at_fork(after_in_child=_forget)
    except Exception as error:
        tell(f"the server is not recorded: {type(error).__name__}: {error}")


def is_asked_for() -> bool:
    """Whether the environment arms the plugin."""
    trace = os.environ.get(TRACE, "").strip().lower()
    if trace == "off":
        return False
    return trace in ARMING or os.environ.get(SWITCH, "").strip().lower() in ON


def tell(text: str) -> None:
    """Into the server's log."""
    logging.getLogger("hicache").warning("hicache: %s", text)


def _answer_for_checker() -> None:
    """Take the place of SGLang's checker; where there is none, stand at the end of the scheduler's start."""
    checker = sys.modules.get(CHECKER)
    if checker is not None:
        for function in (configure, shutdown, assert_same, enabled):
            setattr(checker, function.__name__, function)
        return
    scheduler = sys.modules[SCHEDULER].Scheduler
    start = scheduler.__init__

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        attention = [getattr(self, name, None) for name in ("attn_cp_group", "attn_tp_group")]
        stage = attention if None not in attention else [getattr(self, "tp_group", None)]
        configure([*stage, getattr(self, "pp_group", None)])

    scheduler.__init__ = started


def configure(groups: Sequence[Any], **more: Any) -> None:
    """Begin to record, by the scheduler's thread. Never raises.

    Args:
        groups: as SGLang's scheduler gives them: along cp and tp, or all of a stage; and along pp.
        more: a store, a rank and a world size, in place of torch's.
    """
    global _session, _number
    if _hooks is None:
        return
    try:
        from consensus_checker.sglang_session import Session

        shutdown()
        _number += 1
        axes, settings = along(groups), _settings()
        if settings.get("hicache_host_memory_mode") == "buffer_only" and len(axes.get("pp", ())) > 1:
            tell("the server is not recorded: with host memory buffer_only its stages decide by turns")
            return
        _hooks.install(is_last=True)
        config = {**settings, **_coverage(_hooks)}
        _session = Session(_hooks, axes, _number, tell=tell, config=config, **more)
        _say_coverage(_hooks)
    except Exception as error:
        _session = None
        tell(f"the server is not recorded: {type(error).__name__}: {error}")


def shutdown() -> None:
    """Write the last lines. May be called at any time; never raises."""
    global _session
    session, _session = _session, None
    if session is not None:
        try:
            session.end()
        except Exception as error:
            tell(f"the records did not end well: {type(error).__name__}: {error}")


def assert_same(msg_fmt: str, *args: Any) -> None:
    """A decision that SGLang's code names as one that all ranks must take; recorded by its digest."""
    if _session is not None:
        _session.assert_same(msg_fmt, args)


def enabled() -> bool:
    return _session is not None


def along(groups: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Axis -> ranks of this rank's group along it: cp and tp, or tp alone, and behind them pp."""
    from consensus_checker.consensus_ranks import ranks_of

    given = list(groups)
    has_pipeline = len(given) > 2 or (len(given) == 2 and "pp" in str(getattr(given[1], "unique_name", "")))
    axes = ["tp", "pp"] if has_pipeline else ["tp"]
    if len(given) > len(axes):
        axes.insert(0, "cp")
    return {axis: ranks_of(group) for axis, group in zip(axes, given, strict=True) if group is not None}


def _coverage(hooks: Hooks) -> dict[str, Any]:
    """Which server it is, and what of it is looked at."""
    version = getattr(sys.modules.get("sglang.version"), "__version__", None)
    missing, lacking = (
        [path.removeprefix("sglang.srt.") for path in paths] for paths in (hooks.missing, hooks.lacking)
    )
    return {
        "server": "sglang",
        "version": str(version or getattr(sys.modules.get("sglang"), "__version__", "unknown")),
        "points_found": hooks.due_count,
        "points_missing": missing,
        **({"points_lacking": lacking} if lacking else {}),
    }


def _settings() -> dict[str, Any]:
    """Of the server's arguments those of its cache: the ranks must have been given the same."""
    arguments = None
    for module, name in (("runtime_context", "get_server_args"), ("server_args", "get_global_server_args")):
        with suppress(Exception):
            arguments = arguments or getattr(sys.modules[f"sglang.srt.{module}"], name)()
    page_size = getattr(arguments, "page_size", None)
    found = {name: getattr(arguments, name, None) for name in SETTINGS}
    plain = {name: value for name, value in found.items() if type(value) in (bool, int, float, str)}
    return {
        **plain,
        "hierarchical_cache": bool(plain.get("enable_hierarchical_cache")),
        **({"page_size_tokens": page_size} if type(page_size) is int else {}),
        **_threshold(getattr(arguments, "hicache_storage_backend_extra_config", None)),
    }


def _threshold(extra: Any) -> dict[str, int]:
    """Of a store's own configuration the one number that decides; the rest may name hosts, and stays out."""
    with suppress(Exception):
        found = (json.loads(extra) if isinstance(extra, str) else extra)["prefetch_threshold"]
        if type(found) is int:
            return {"prefetch_threshold_tokens": found}
    return {}


def _say_coverage(hooks: Hooks) -> None:
    if hooks.missing:
        names = ", ".join(path.rsplit(".", 1)[1] for path in hooks.missing)
        tell(f"{len(hooks.found)} functions are recorded; this version lacks {len(hooks.missing)}: {names}")


def _forget() -> None:
    """In a forked child nobody is the scheduler, and the files are its parent's."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.abandon()
