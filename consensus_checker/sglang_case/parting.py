"""Where the logs of two ranks part, and what went otherwise on one: a fact that a test can give to the cache.

    ref   ... alloc_host wants 2, gets 2     the pool of the odd rank refuses its n-th request of that step
    odd   ... alloc_host wants 2, gets 0

A rank is odd by what its log has: an answer of a pool, a count, a page that is missing, a step that it did
not take. Where both took the same steps with the same answers and decided otherwise all the same, the cause
is in no log; it may be in the code, and then the same steps bring it about again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from consensus_checker.sglang_case.script import Record, Script, Step, script_of

# Of a prefetch: no count has gone up, so nothing was decided about it.
NOTHING = "ongoing"
ROOM = "device_pages_free"
# Of an eviction: what is lacking of what somebody needs.
WANTED = "pages_wanted"
EVICTIONS = ("evict", "evict_for_alloc")
COUNTS = ("writes_agreed", "loads_agreed", "hits_agreed", "prefetch_acks_agreed", "storage_acks_agreed")


@dataclass(frozen=True, slots=True)
class Side:
    """One rank.

    Attributes:
        records: of its scheduler, without meetings.
        at: index of the first that differs, or of the end.
    """

    rank: int
    records: Sequence[Record]
    script: Script
    at: int

    @property
    def record(self) -> Record | None:
        return self.records[self.at] if self.at < len(self.records) else None

    @property
    def index(self) -> int:
        """Of the step that the record is of."""
        steps = self.script.steps
        return next((index for index, step in enumerate(steps) if step.end >= self.at), len(steps))

    @property
    def step(self) -> Step | None:
        steps = self.script.steps
        return steps[self.index] if self.index < len(steps) else None

    def order_in_step(self, kind: str) -> int:
        """How many records of a kind the step has before the one that differs."""
        steps, index = self.script.steps, self.index
        # A rank that died in a step has no record that says which it was.
        begin = steps[index - 1].end + 1 if index else 0
        return sum(record["kind"] == kind for record in self.records[begin : self.at])


@dataclass(frozen=True, slots=True)
class Parting:
    """What two ranks have in common, and what not.

    Attributes:
        steps: as a test takes them; those of one rank only have `ranks`, what goes otherwise is in `odd`.
        cause: what goes otherwise, in words; "" where no log tells.
        call: of the reference, of the odd rank: what differs; "" behind the last.
        stop: what comes before it that no test can do again; "" where nothing does.
    """

    reference: Side
    odd: Side
    steps: Sequence[Mapping[str, Any]]
    cause: str
    call: tuple[str, str]
    stop: str


def parting(
    reference: tuple[int, Sequence[Record]],
    odd: tuple[int, Sequence[Record]],
    compared: Mapping[str, Sequence[str]],
    *,
    has_storage: bool,
) -> Parting | None:
    """Find it.

    Args:
        reference, odd: rank, and its scheduler's records from its first step on.
        compared: kind -> fields that must be equal.

    Returns:
        None where neither log has a record that differs from the other's.
    """
    ours, theirs = ([r for r in records if r["kind"] != "meeting"] for _, records in (reference, odd))
    found = _first_difference(ours, theirs, compared)
    if found is None:
        return None
    left = Side(reference[0], ours, script_of(ours, has_storage=has_storage), found[0])
    right = Side(odd[0], theirs, script_of(theirs, has_storage=has_storage), found[1])
    cause, steps = "", _common(left, right)
    if is_otherwise := _otherwise(left, right, compared):
        side, index, deed, cause = is_otherwise
        if index < len(steps):
            steps[index] = {**steps[index], "odd": {str(side.rank): deed}}
        else:
            cause = ""
    elif _flows_apart(left, right):
        cause = f"rank {right.rank} {_did(right.step)} where rank {left.rank} {_did(left.step)}"
        steps = [*steps[: left.index], *(_only(side) for side in (left, right) if side.step is not None)]
    stops = [side.script.stop for side in (left, right) if side.script.stop is not None]
    before = [why for index, why in stops if index <= left.at]
    return Parting(left, right, steps, cause, (_call(left), _call(right)), next(iter(before), ""))


def _first_difference(
    ours: Sequence[Record], theirs: Sequence[Record], compared: Mapping[str, Sequence[str]]
) -> tuple[int, int] | None:
    """Index in each of the first record that is not equal in what must be."""
    left = [index for index, record in enumerate(ours) if record["kind"] in compared]
    right = [index for index, record in enumerate(theirs) if record["kind"] in compared]
    for one, two in zip(left, right, strict=False):
        if not _is_equal(ours[one], theirs[two], compared):
            return one, two
    if len(left) == len(right):
        return None
    shorter = min(len(left), len(right))
    return tuple(  # type: ignore[return-value]
        indices[shorter] if shorter < len(indices) else len(records)
        for indices, records in ((left, ours), (right, theirs))
    )


def _is_equal(one: Record, two: Record, compared: Mapping[str, Sequence[str]]) -> bool:
    kind = one["kind"]
    if kind != two["kind"] or one.get("phase") != two.get("phase"):
        return False
    return all(one.get(name) == two.get(name) for name in compared[kind])


def _common(left: Side, right: Side) -> list[dict[str, Any]]:
    """The reference's steps up to that in which it parted, with what was done on each rank by then."""
    steps = []
    theirs = iter([step for step in right.script.steps if step.do == "round"])
    for step in left.script.steps[: left.index + 1]:
        told = step.to_json()
        if step.do == "round":
            other = next(theirs, step)
            told["done"] = {str(left.rank): step.more["done"], str(right.rank): other.more["done"]}
        steps.append(told)
    return steps


def _only(side: Side) -> dict[str, Any]:
    assert side.step is not None
    told = side.step.to_json()
    if side.step.do == "round":
        told["done"] = {str(side.rank): side.step.more["done"]}
    return {**told, "ranks": [side.rank]}


def _otherwise(
    left: Side, right: Side, compared: Mapping[str, Sequence[str]]
) -> tuple[Side, int, dict[str, Any], str] | None:
    """On which side, in which of the common steps, what goes otherwise; and in words."""
    ours, theirs = left.record, right.record
    if ours is None or theirs is None:
        return None
    answers = ((right, _answer(right, theirs, ours)), (left, _answer(left, ours, theirs)))
    for side, found in (*answers, (right, _input(left, right)), (right, _order(left, right))):
        if found is not None:
            deed, cause = found
            return side, left.index, deed, f"rank {side.rank}: {cause}"
    return _less_room(left, right, compared)


def _answer(side: Side, own: Record, other: Record) -> tuple[dict[str, Any], str] | None:
    """What this rank was given otherwise than the other, in the record that differs."""
    kind = own["kind"]
    if kind == "transfer_enqueue" and other["kind"] == "write_backup":
        # The backup itself is written when it is over.
        order = side.order_in_step("write_backup")
        return {"flush_in_backup": order}, "what was to be written went off by itself, in a backup"
    if kind != other["kind"] or own.get("phase") != other.get("phase"):
        return None
    if kind == "alloc_host" and own.get("pages") == 0 != other.get("pages"):
        order = side.order_in_step(kind)
        return {"refuse_host_alloc": order}, f"the host pool refused {own.get('pages_wanted')} pages"
    if kind == "alloc" and own.get("pages") == 0 != other.get("pages"):
        order = side.order_in_step(kind)
        return {"refuse_alloc": order}, f"the device's pool refused {own.get('pages_wanted')} pages"
    if kind == "event_round" and own.get("phase") == "return":
        counts = [int(own.get(name) or 0) for name in COUNTS]
        others = [int(other.get(name) or 0) for name in COUNTS]
        if counts != others and all(one <= two for one, two in zip(counts, others, strict=True)):
            return {"counts": counts}, f"went by the counts {counts} where {others} were agreed on"
    if kind == "prefetch_submit" and own.get("outcome") == NOTHING != other.get("outcome"):
        return {"skip_prefetch": side.order_in_step(kind)}, "asked for nothing of what is stored"
    return None


def _input(left: Side, right: Side) -> tuple[dict[str, Any], str] | None:
    """What the odd rank put into its tree otherwise. It is written behind what came of it."""
    ours, theirs = (_next_of("insert", side) for side in (left, right))
    if ours is None or theirs is None or ours.get("content") == theirs.get("content"):
        return None
    if ours.get("tokens") != theirs.get("tokens"):
        return None
    # All that is known of where they differ: behind what the tree had of both.
    place = min(int(record.get("prefix_tokens") or 0) for record in (ours, theirs))
    return {"other_token": [right.order_in_step("insert"), place]}, "inserted other tokens"


def _next_of(kind: str, side: Side) -> Record | None:
    end = side.step.end if side.step is not None else side.at
    return next((record for record in side.records[side.at : end + 1] if record["kind"] == kind), None)


def _order(left: Side, right: Side) -> tuple[dict[str, Any], str] | None:
    """Who waits in another order: as the odd rank looks at them next."""
    ours, theirs = left.record, right.record
    assert ours is not None and theirs is not None
    if {ours["kind"], theirs["kind"]} != {"event_round"} or ours.get("waiting") == theirs.get("waiting"):
        return None
    if (ours.get("waiting") or [0])[0] != (theirs.get("waiting") or [0])[0]:
        return None
    came = {step.rid for step in right.script.steps[: right.index] if step.do == "arrive"}
    behind = right.script.steps[right.index + 1 :]
    looked = dict.fromkeys(step.rid for step in behind if step.do in ("poll", "match") and step.rid in came)
    return {"order": list(looked)}, "had the same number of requests waiting, in another order"


def _less_room(
    left: Side, right: Side, compared: Mapping[str, Sequence[str]]
) -> tuple[Side, int, dict[str, Any], str] | None:
    """Which rank had less room than the other before they parted, from which step on."""
    both = (
        [record for record in side.records[: side.at + 1] if record["kind"] in compared]
        for side in (left, right)
    )
    for one, two in zip(*both, strict=False):
        if one["kind"] != two["kind"]:
            break
        ours, theirs = one.get(ROOM), two.get(ROOM)
        if not isinstance(ours, int) or not isinstance(theirs, int) or ours == theirs:
            continue
        side, pages = (right, ours - theirs) if theirs < ours else (left, theirs - ours)
        index = replace(left, at=left.records.index(one)).index
        return _missing(side, index, pages)
    # A pool that nobody has looked at since: who asks for room asks for as much as is lacking.
    ours, theirs = left.record or {}, right.record or {}
    one, two = ours.get(WANTED), theirs.get(WANTED)
    is_eviction = ours.get("kind") == theirs.get("kind") and ours.get("kind") in EVICTIONS
    if not is_eviction or not isinstance(one, int) or not isinstance(two, int) or one == two:
        return None
    return _missing(right if two > one else left, left.index, abs(two - one))


def _missing(side: Side, index: int, pages: int) -> tuple[Side, int, dict[str, Any], str]:
    cause = f"rank {side.rank}: of the device's pool {pages} pages were missing"
    return side, index, {"hold_pages": pages}, cause


def _flows_apart(left: Side, right: Side) -> bool:
    """Whether the two took other steps, rather than decided otherwise in the same one."""
    ours, theirs = left.step, right.step
    return (ours and ours.name) != (theirs and theirs.name)


def _did(step: Step | None) -> str:
    return "did nothing more" if step is None else f"took the step {' '.join(filter(None, step.name))}"


def _call(side: Side) -> str:
    record = side.record
    return "" if record is None else " ".join(filter(None, (record["kind"], record.get("phase"))))
