"""Which ranks must agree, and what they must have in common before they can be compared.

Owns what ranks say to each other once, over a store, before anything is recorded. A rank knows only its own
groups, so each tells its own, and reads those of the ranks in them, and of the ranks in theirs:

    rank 0    tp [0, 1]  pp [0, 2]          hello/0  hello/1  hello/2  hello/3
    rank 3    tp [2, 3]  pp [1, 3]          {0, 1, 2, 3} must agree; the lowest of them tells the rest

torch is looked at where the process has imported it; no group is made and no collective is called.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from consensus_checker.words import ranks_text
from tracer.keyed import COMMON_ALGORITHM, KEY_BITS, best_algorithm
from tracer.plausible import INTEGER_MAX, WORLD_SIZE_MAX

PREFIX = "hicache/consensus"
RANK_VARIABLE, WORLD_VARIABLE = "RANK", "WORLD_SIZE"
KEY_VARIABLE = "HICACHE_DIGEST_KEY"
# What the launcher gives all ranks alike; torchrun's own are taken where ours are not set.
RUN_VARIABLES = ("HICACHE_RUN_ID", "TORCHELASTIC_RUN_ID")
ATTEMPT_VARIABLES = ("HICACHE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")
# torchrun's for a job that was given no name.
UNNAMED = "none"
# A run id is part of a folder's name.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# The run of a rank that has met nobody.
ALONE = "consensus"
POLL_S, POLL_MAX_S = 0.002, 0.1
# A key that vanished between a look and a get must not block whoever gets it.
GET_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks that must agree have in common.

    Attributes:
        members: those ranks, ascending; this one is among them.
        algorithm, key: of digests; `key` stands in no log.
        run_id: of all their logs, and of those of other replicas if the store can say.
        has_logs: the folder of the first of them held logs of the same name before.
        attempt: how often the job was started again under that run id.
    """

    members: tuple[int, ...]
    algorithm: str
    key: int
    run_id: str
    has_logs: bool
    attempt: int = 0


class Prefixed:
    """Names below a prefix of any object with `set` and `get`, with what a torch store has besides."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.underlying_store = store
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(self._prefix + key, value)

    def get(self, key: str) -> Any:
        return self.underlying_store.get(self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        own = getattr(self.underlying_store, "check", None)
        if own is not None:
            return bool(own([self._prefix + key for key in keys]))
        return all(_held(self.underlying_store, self._prefix + key) is not None for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[Any]:
        own = getattr(self.underlying_store, "multi_get", None)
        if own is not None:
            return list(own([self._prefix + key for key in keys]))
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        own = getattr(self.underlying_store, "delete_key", None)
        return bool(own(self._prefix + key)) if own is not None else False

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self.underlying_store.compare_set(self._prefix + key, expected, desired)

    def clone(self) -> Prefixed:
        return Prefixed(self.underlying_store.clone(), self._prefix)

    def set_timeout(self, timeout: timedelta) -> None:
        self.underlying_store.set_timeout(timeout)


def _held(store: Any, key: str) -> Any:
    """What a store holds that can't be asked first: it says no by None or by raising."""
    try:
        return store.get(key)
    except Exception:
        return None


def own_store(store: Any, prefix: str) -> Prefixed:
    """A part of `store`, on a connection of its own if it can be had: the engine's may be in a long wait."""
    with suppress(Exception):
        cloned = store.clone()
        cloned.set_timeout(GET_TIMEOUT)
        store = cloned
    return Prefixed(store, prefix)


def default_store() -> Any:
    """torch's own, where the process has set up its process group; else None."""
    distributed = _distributed()
    if distributed is None:
        return None
    with suppress(Exception):
        return distributed.distributed_c10d._get_default_store()
    return None


def _distributed() -> Any:
    """`torch.distributed`, where it is imported and set up; else None."""
    found = sys.modules.get("torch.distributed")
    with suppress(Exception):
        if found is not None and found.is_available() and found.is_initialized():
            return found
    return None


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group, of an object with a `cpu_group`, or of a list of ranks.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(group, Iterable) and not isinstance(group, str | bytes | Mapping):
        ranks = list(group)
    elif isinstance(own := getattr(group, "ranks", None), Sequence):
        ranks = list(own)
    else:
        ranks = _torch_ranks(getattr(group, "cpu_group", group))
    for rank in ranks:
        if type(rank) is not int or not 0 <= rank < WORLD_SIZE_MAX:
            raise TypeError(f"configure: {rank!r} in a group is no rank")
    return tuple(dict.fromkeys(ranks))


def _torch_ranks(group: Any) -> list[int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(group, getattr(distributed, "ProcessGroup", ())):
        raise TypeError(
            f"configure: {type(group).__name__} is no process group, has no cpu_group, is no list of ranks"
        )
    return list(distributed.get_process_group_ranks(group))


def own_rank(given: int | None, groups: Sequence[Sequence[int]]) -> int:
    """This process's global rank.

    Raises:
        ValueError: nobody says it, or it is in none of its own groups.
    """
    rank = given
    distributed = _distributed()
    if rank is None and distributed is not None:
        rank = int(distributed.get_rank())
    if rank is None and os.environ.get(RANK_VARIABLE, "").isdecimal():
        rank = int(os.environ[RANK_VARIABLE])
    if rank is None and not groups:
        rank = 0
    if rank is None:
        raise ValueError(
            f"configure: which rank is this? Give rank=, set {RANK_VARIABLE}, or set up torch.distributed"
        )
    outside = [tuple(group) for group in groups if rank not in group]
    if outside:
        raise ValueError(f"configure: rank {rank} is not in its group {outside[0]}")
    return rank


def world_size(given: int | None, members: Sequence[int]) -> int:
    """Ranks of the whole job, at least those that are known."""
    found = given or 0
    distributed = _distributed()
    if not found and distributed is not None:
        found = int(distributed.get_world_size())
    if not found and os.environ.get(WORLD_VARIABLE, "").isdecimal():
        found = int(os.environ[WORLD_VARIABLE])
    return max(found, members[-1] + 1)


def shared_run_id() -> str:
    """The run's name as the environment has it, or ""; what can't name a folder is digested."""
    for name in RUN_VARIABLES:
        text = os.environ.get(name, "").strip()
        if text and text != UNNAMED:
            return text if RUN_ID.fullmatch(text) else blake2b(text.encode(), digest_size=8).hexdigest()
    return ""


def shared_attempt() -> int:
    """How often the job was started again, as the environment has it; 0 where it does not say."""
    for name in ATTEMPT_VARIABLES:
        text = os.environ.get(name, "").strip()
        if text.isascii() and text.isdecimal() and int(text) <= INTEGER_MAX:
            return int(text)
    return 0


def lacking() -> str:
    """What ranks that can ask nobody do not have in common, to be put behind a sentence; or nothing."""
    found = []
    if not shared_run_id():
        found.append(f"{RUN_VARIABLES[0]}, so that logs of two runs can be taken for one")
    if not os.environ.get(KEY_VARIABLE):
        found.append(f"{KEY_VARIABLE}, so that digests are under no secret key")
    return f" (not set: {'; '.join(found)})" if found else ""


def alone(groups: Sequence[Sequence[int]], rank: int, *, has_logs: bool) -> Agreed:
    """What a rank assumes that can ask nobody."""
    members = tuple(sorted({rank, *(other for group in groups for other in group)}))
    text = os.environ.get(KEY_VARIABLE, "")
    key = int.from_bytes(blake2b(text.encode(), digest_size=KEY_BITS // 8).digest(), "big") if text else 0
    # Others may not have the faster one.
    run_id = shared_run_id() or ALONE
    return Agreed(members, COMMON_ALGORITHM, key, run_id, has_logs, shared_attempt())


def agree(
    store: Prefixed,
    groups: Sequence[Sequence[int]],
    rank: int,
    *,
    timeout_s: float,
    has_logs: Callable[[Sequence[int]], bool],
) -> Agreed:
    """Find out with the others who must agree, and on which digests.

    Args:
        has_logs: whether the folder of the logs already has some of these ranks.

    Raises:
        TimeoutError: somebody has not said hello in time; the text has who.
        Exception: what the store raises.
    """
    deadline = time.monotonic() + timeout_s
    hello = {"groups": [list(group) for group in groups], "algorithm": best_algorithm()}
    store.set(f"hello/{rank}", json.dumps(hello))
    heard: dict[int, dict[str, Any]] = {rank: hello}
    due = {other for group in groups for other in group} - {rank}
    while due:
        fresh = _wait(store, due, deadline)
        heard |= fresh
        due = {other for told in fresh.values() for group in told["groups"] for other in group} - set(heard)
    members = tuple(sorted(heard))
    if rank == members[0]:
        algorithms = {str(told["algorithm"]) for told in heard.values()}
        agreed: dict[str, Any] = {
            "algorithm": algorithms.pop() if len(algorithms) == 1 else COMMON_ALGORITHM,
            "key": secrets.randbits(KEY_BITS),
            "run": shared_run_id() or _run_id(store),
            "has_logs": has_logs(members),
            "attempt": shared_attempt(),
        }
        store.set(f"agreed/{rank}", json.dumps(agreed))
    else:
        agreed = _wait_one(store, f"agreed/{members[0]}", members[0], deadline)
    return Agreed(
        members,
        agreed["algorithm"],
        agreed["key"],
        agreed["run"],
        agreed["has_logs"],
        agreed.get("attempt", 0),
    )


def _run_id(store: Prefixed) -> str:
    """One for all replicas that share the store, if it can tell who was first."""
    own = secrets.token_hex(8)
    with suppress(Exception):
        first = store.compare_set("run", "", own)
        return first.decode() if isinstance(first, bytes) else str(first)
    return own


def _wait(store: Prefixed, ranks: Iterable[int], deadline: float) -> dict[int, dict[str, Any]]:
    return {rank: _wait_one(store, f"hello/{rank}", rank, deadline) for rank in sorted(ranks)}


def _wait_one(store: Prefixed, key: str, rank: int, deadline: float) -> dict[str, Any]:
    pause_s = POLL_S
    while True:
        value = store.get(key) if store.check([key]) else None
        if value is not None:
            found: dict[str, Any] = json.loads(value)
            return found
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{ranks_text([rank])} has not come to configure")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_MAX_S)
