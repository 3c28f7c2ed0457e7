"""What one line of a log means: kinds of record and the header that declares them.

A rank's log is a set of files, one per lane. Each line is one JSON object that starts with
`seq, step, time_ns, kind` and goes on with the kind's own fields. The header, always the first
line, carries every `Kind`, so that a reader needs nothing but the log to know which ranks must
agree on a record, on which of its fields, and which fields are facts local to one rank.

This module knows records, not caches: it never imports the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = "hicache.log"
# A reader accepts every minor version of its own major version and refuses the others.
VERSION = (1, 3)

HEADER = "header"
TRAILER = "trailer"
# A kind that any lane may write: what the lane is at, in its field `state`, and with which `op`. A lane
# is idle while its queue is empty; in `backend` it waits for an external store, in `collective` for peers.
LANE_STATE = "lane_state"
IDLE, BACKEND, COLLECTIVE, ENDED = "idle", "backend", "collective", "ended"
# The lane that decides; the others of its rank work for it.
MAIN_LANE = "scheduler"
# Present in every line, in this order, before the kind's own fields.
COMMON = ("seq", "step", "time_ns", "kind")
# Not a record: a line with a checksum over the lines before it, up to the one before that.
BLOCK = "block"

# A line as a reader has it: the common fields, and its kind's own.
Record = Mapping[str, Any]

Role = Literal["decision", "event", "meeting", "transfer", "anomaly", "note"]
# How one lane ended: it did its work; it could not go on; it raised; it was closed because the run
# ended for a reason that is not in this lane.
Outcome = Literal["completed", "hung", "crashed", "stopped"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of record: the contract between whoever writes a log and whoever checks it.

    Attributes:
        name: value of the line's `kind`; lower snake case.
        role: `decision` (the control plane chose), `event` (it learned), `meeting` (it entered or
            left a collective), `transfer` (bytes between tiers), `anomaly` (says by itself that
            something is wrong), `note` (local, for people).
        agree: axes of the topology along which ranks must write this record in the same order
            with equal `compared` fields. Empty: never compared between ranks.
        compared: fields that must be equal on those ranks.
        local: fields that may differ; they explain a difference when there is one.
        info: fields that are neither compared nor offered as an explanation.
        leader: axis along which coordinate 0 decides the `led` fields and the others adopt, or None.
        led: compared fields that the leader decides; the others are every rank's own.
        result: the compared field that the decision sets, or None. A number of nothing (0) or the
            word of a refusal is less than any other.
        needs: local fact -> field of the same record that says how much of it was needed. The
            `result` is expected to be less where the fact falls below the need.
        feeds: local fact -> the compared field that is made of it and of its likes on other ranks: it
            explains a difference in no other field.
        given: compared fields that whoever calls hands in, of a record that is written when the call has
            ended: it stands behind those of what the call did.
        counters: integer fields that go on counting while nothing happens, such as the number of a round:
            two idle steps are alike when they differ in nothing else.
    """

    name: str
    role: Role
    agree: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    info: tuple[str, ...] = ()
    leader: str | None = None
    led: tuple[str, ...] = ()
    result: str | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    feeds: Mapping[str, str] = field(default_factory=dict)
    counters: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (*self.compared, *self.local, *self.info)
        assert len(set(names)) == len(names), f"kind {self.name}: a field is declared twice: {names}"
        taken = set(names) & {*COMMON, "phase"}
        assert not taken, f"kind {self.name}: {sorted(taken)} are in every record"
        assert not self.compared or self.agree, f"kind {self.name}: compared fields but no axis to agree on"
        assert set(self.led) <= set(self.compared), f"kind {self.name}: led fields that are not compared"
        assert self.result is None or self.result in self.compared, (
            f"kind {self.name}: result {self.result} is not compared"
        )
        for fact, need in self.needs.items():
            assert fact in self.local, f"kind {self.name}: need of {fact}, which is not a local fact"
            assert need in names, f"kind {self.name}: {fact} needs {need}, which is not a field"
        for fact, fed in self.feeds.items():
            assert fact in self.local, f"kind {self.name}: {fact} feeds {fed}, and is no local fact"
            assert fed in self.compared, f"kind {self.name}: {fact} feeds {fed}, which is not compared"
        assert set(self.counters) <= set(names), f"kind {self.name}: counters that are not fields"
        assert set(self.given) <= set(self.compared), f"kind {self.name}: given fields that are not compared"

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field of the kind, in the order in which a line carries them."""
        return (*self.compared, *self.local, *self.info)

    def declaration(self) -> dict[str, Any]:
        """The kind as the header carries it; empty parts are left out."""
        parts: dict[str, Any] = {"role": self.role}
        for part in ("agree", "compared", "local", "info"):
            if names := getattr(self, part):
                parts[part] = list(names)
        if self.leader is not None:
            parts["leader"] = self.leader
            parts["led"] = list(self.led)
        if self.result is not None:
            parts["result"] = self.result
        if self.needs:
            parts["needs"] = dict(self.needs)
        if self.feeds:
            parts["feeds"] = dict(self.feeds)
        if self.counters:
            parts["counters"] = list(self.counters)
        if self.given:
            parts["given"] = list(self.given)
        return parts

    @classmethod
    def from_declaration(cls, name: str, parts: Mapping[str, Any]) -> Kind:
        """Read a header's declaration; unknown parts of a newer minor version are ignored.

        Raises:
            ValueError: a part has the wrong shape; the text names the kind and the part.
        """

        def names(part: str) -> tuple[str, ...]:
            value = parts.get(part, [])
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"kind {name}: {part} is not a list of names")
            return tuple(value)

        maps = {part: parts.get(part, {}) for part in ("needs", "feeds")}
        for part, value in maps.items():
            if not isinstance(value, dict):
                raise ValueError(f"kind {name}: {part} is not a map")
        try:
            return cls(
                name,
                parts.get("role", "note"),
                agree=names("agree"),
                compared=names("compared"),
                local=names("local"),
                info=names("info"),
                leader=parts.get("leader"),
                led=names("led"),
                result=parts.get("result"),
                needs=maps["needs"],
                feeds=maps["feeds"],
                counters=names("counters"),
                given=names("given"),
            )
        except AssertionError as error:
            raise ValueError(str(error)) from None


# What the recorder itself writes, into any lane.

# Steps like the one before this record, in which nothing happened: `count` of them, from `first_step` to the
# record's own step, `records` in each. They stand for themselves: `advance` has, for every record of a step
# and every counter of its kind, by how much it went up from one step to the next.
IDLE_STEPS = Kind("idle", "note", info=("first_step", "count", "records", "advance"))
# `digest` runs over the compared fields of the first `count` links, each a record that agrees along `axes` or
# a call with its outcome; each digest runs over the one before it. `chains` has the same, as [count, digest],
# for all axes that have a checkpoint at this very place. `records_of` has, for all axes, how many records of
# the lane come before this one; it is empty where nobody knows. `notes` counts those that a checker must see
# wherever they are.
CHECKPOINT = Kind("checkpoint", "note", info=("axes", "count", "digest", "chains", "records_of", "notes"))
# From the next step on only windows of `window` steps are written, one in `one_in`: the recorder had taken
# `share` thousandths of the loop's time, and may take `share_max`.
THROTTLE = Kind("throttle", "note", info=("window", "one_in", "share", "share_max"))
# The process is alive. What each of its lanes had come to, and for how long it had written nothing.
HEARTBEAT = Kind("heartbeat", "note", info=("count", "lanes", "seqs", "steps", "still_ns"))
# Copies of this rank's files were kept in `folder`, where a ring does not drop them.
FREEZE = Kind("freeze", "note", info=("folder", "reason", "files"))
OWN_KINDS = (IDLE_STEPS, CHECKPOINT, THROTTLE, HEARTBEAT, FREEZE)
# The lane of heartbeats: it works for nobody, and nobody waits for it.
HEART_LANE = "heart"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the job a log was written.

    Attributes:
        rank: global rank, 0..world_size-1.
        coordinates: axis -> this rank's coordinate on it, for example {"dp": 0, "pp": 1, "tp": 3}.
        sizes: axis -> number of coordinates, in the order in which ranks are numbered.
        groups: group name -> the global ranks in it, only groups this rank belongs to.
    """

    rank: int
    coordinates: Mapping[str, int]
    sizes: Mapping[str, int]
    groups: Mapping[str, Sequence[int]]

    @property
    def world_size(self) -> int:
        size = 1
        for count in self.sizes.values():
            size *= count
        return size


def header(
    place: Place,
    kinds: Sequence[Kind],
    *,
    lane: str,
    run_id: str,
    tool_version: str,
    config: Mapping[str, Any] | None = None,
    config_digest: str = "",
    attempt: int = 0,
) -> dict[str, Any]:
    """The first line of every log.

    Host, pid and wall clock are not here: they live in `rank0003.meta.json`, so that two equal runs
    of the simulator write equal bytes.
    """
    return {
        "format": FORMAT,
        "version": list(VERSION),
        "tool_version": tool_version,
        "run_id": run_id,
        "attempt": attempt,
        "rank": place.rank,
        "lane": lane,
        "world_size": place.world_size,
        "coordinates": dict(place.coordinates),
        "sizes": dict(place.sizes),
        "groups": {name: list(ranks) for name, ranks in place.groups.items()},
        "kinds": {kind.name: kind.declaration() for kind in (*kinds, *OWN_KINDS)},
        "redaction": "digests",
        "digest": "blake2b-64 keyed",
        "config_digest": config_digest,
        "config": dict(config or {}),
    }
