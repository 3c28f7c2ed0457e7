"""One dump of a flight recorder, decoded, as rows: whatever its values are.

    pg_config   name -> name, description, members (a text)        who could be asked
    pg_status   local number -> last enqueued, started, completed  how far, of every group that was ever used
    entries     the ring: one call each, with the name of its group and the local number

Names and local numbers meet in the entries. A group without an entry is linked by order, where every name is
a number: both count up as groups are made. A status counts collectives and point-to-point calls alike, so it
says nothing of a group that has both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from tracer.importers.dossier import At, Call, Dump, FileRead, Group, Progress, Who
from tracer.importers.recorded_calls import RETIRED, STATES, CallTable, RecordedCalls
from tracer.importers.sniff import COUNT_MAX, printable

TEXT_CHARS_MAX = 200
MEMBERS_MAX = 1 << 17
RANK_MAX = 1 << 24
# Tensors of one call, and dimensions of one tensor.
TENSORS_MAX, DIMENSIONS_MAX = 4096, 64
TENSORS_SHOWN_MAX = 16
FRAMES_MAX = 64
# Point-to-point calls that have ended are kept only so far back.
P2P_KEPT = 16

FIELDS = (
    *("process_group", "is_p2p", "collective_seq_id", "profiling_name", "state", "retired"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
)
_fields = itemgetter(*FIELDS)
# What versions before the field had in its place.
ABSENT: dict[str, Any] = {
    **{"is_p2p": False, "state": "scheduled", "retired": False},
    **{"input_sizes": (), "input_dtypes": (), "output_sizes": (), "output_dtypes": ()},
}
TORCH = ("torch/distributed/", "torch/nn/", "torch/_", "torch/utils/", "torch/autograd/")


def compiled(document: dict[str, Any], rank: int | None, form: str, about: FileRead, at: At) -> Dump:
    """The dump as rows; its entries are counted in `about`, those that say nothing as unparsed.

    Args:
        rank: as the line around it says, None where there is none.
        form: `pickle`, `json`, `lines` or `list`: in the first two the file is this dump alone.
    """
    return _Compiler(at, form in ("pickle", "json"), about).dump(document, rank, form)


@dataclass(slots=True)
class _Calls:
    """One group's entries while they are taken."""

    calls: RecordedCalls
    pg_id: int
    # By number; a job that has many sends and receives keeps the open and the newest.
    p2p: list[Call] = field(default_factory=list)
    p2p_count: int = 0
    last_record: int = 0


@dataclass(slots=True)
class _Compiler:
    """One dump on its way from what a file holds to rows."""

    at: At
    is_alone: bool
    about: FileRead
    table: CallTable = field(default_factory=CallTable)
    groups: dict[tuple[str, str], _Calls] = field(default_factory=dict)
    backends: Counter[str] = field(default_factory=Counter)
    shapes: dict[Any, int] = field(default_factory=dict)
    callers: dict[Any, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def dump(self, document: dict[str, Any], rank: int | None, form: str) -> Dump:
        entries = document.get("entries")
        listed = entries if isinstance(entries, list) else []
        unparsed = sum(not self._entry(entry, at) for at, entry in enumerate(listed))
        self.about.records += max(1, len(listed))
        self.about.unparsed += unparsed + (entries is not None and not isinstance(entries, list))
        # JSON leaves out an empty list as well; a pickle has none only where it was told to leave it out.
        left_out = entries is None and form == "pickle"
        if left_out:
            self.notes.append("calls were left out of this dump")
        backend = self._backend(document)
        groups = tuple(self._groups(document, backend))
        return Dump(
            who=Who(rank=self._rank(document, rank, groups)),
            sample=0,
            version=document["version"],
            backend=backend,
            has_entries=bool(listed),
            entry_count=len(listed),
            groups=groups,
            at=self.at,
            notes=tuple(self.notes),
            form=form,
            are_calls_left_out=left_out,
        )

    def _at(self, entry: int) -> At:
        """Where an entry is: by its own number in a file of one dump, by the dump's in one of many."""
        return At(self.at.file, entry) if self.is_alone else self.at

    def _rank(self, document: dict[str, Any], rank: int | None, groups: Sequence[Progress]) -> int | None:
        """As the line, our own export or the groups say; None where they contradict each other."""
        own = document.get("hicache")
        other = count_of(own.get("rank"), RANK_MAX) if isinstance(own, dict) else None
        if rank is not None and other is not None and rank != other:
            self.about.notes.append(f"a dump says both rank {rank} and rank {other}: it counts for neither")
            return None
        rank = other if rank is None else rank
        members = [set(one.group.members) for one in groups if one.group.members]
        if rank is None:
            # A process lists the groups that it is in: often there is only one rank that is in all of them.
            common = set.intersection(*members) if members else set()
            return common.pop() if len(common) == 1 else None
        for one in groups:
            if one.group.members and rank not in one.group.members and (one.calls or one.p2p):
                self.about.notes.append(
                    f"a dump of rank {rank} has calls of group {one.group.name}, whose members don't include "
                    "it: it counts for no rank"
                )
                return None
        return rank

    def _backend(self, document: dict[str, Any]) -> str:
        if self.backends:
            return self.backends.most_common(1)[0][0]
        library = document.get("comm_lib_version", document.get("nccl_version"))
        return "nccl" if isinstance(library, str) and library else ""

    def _entry(self, entry: Any, at: int) -> bool:
        """Take one entry; whether it says what it should."""
        try:
            group, is_p2p, seq, name, state, retired, *tensors = _fields(entry)
        except (KeyError, TypeError):
            if not isinstance(entry, dict):
                return False
            group, is_p2p, seq, name, state, retired, *tensors = (
                entry.get(field, ABSENT.get(field)) for field in FIELDS
            )
        if is_p2p is True:
            seq = entry.get("p2p_seq_id")
        if type(seq) is not int or not 0 <= seq <= COUNT_MAX:
            seq = count_of(seq, COUNT_MAX)
            if seq is None:
                return False
        try:
            calls = self.groups.get(group) or self._begin(group, entry)
        except TypeError:
            # A list, in JSON.
            calls = self._begin(group, entry)
        if calls is None:
            return False
        try:
            inputs, input_types, outputs, output_types = tensors
            if (
                len(inputs) + len(outputs) > TENSORS_MAX
                or max(map(len, inputs), default=0) > DIMENSIONS_MAX
                or max(map(len, outputs), default=0) > DIMENSIONS_MAX
                or len(input_types) + len(output_types) > TENSORS_MAX
            ):
                return False
            key = (
                name,
                tuple(map(tuple, inputs)),
                tuple(input_types),
                tuple(map(tuple, outputs)),
                tuple(output_types),
            )
            shape = self.shapes.get(key)
            if shape is None:
                shape = self.shapes[key] = self._shape(*key)
            progress = STATE_NUMBERS.get(state, 0) | (RETIRED if retired is True else 0)
        except (TypeError, ValueError):
            return False
        caller = self._caller(entry)
        calls.last_record = at
        if is_p2p is True:
            self._p2p(calls, seq, shape, progress, caller, at)
        else:
            calls.calls.add(seq, shape, progress, self._at(at).record, caller)
        return True

    def _begin(self, group: Any, entry: dict[str, Any]) -> _Calls | None:
        """The calls of a group by its name and description; None where it has none."""
        if not isinstance(group, (list, tuple)) or len(group) != 2:
            return None
        name, description = group
        if not isinstance(name, str) or not isinstance(description, str):
            return None
        key = (short(name), short(description))
        calls = self.groups.get(key)
        if calls is None:
            pg_id = count_of(entry.get("pg_id"), COUNT_MAX)
            calls = _Calls(RecordedCalls(self.at.file, self.table), -1 if pg_id is None else pg_id)
            self.groups[key] = calls
        if isinstance(group, tuple):
            self.groups.setdefault((name, description), calls)
        return calls

    def _shape(self, name: Any, inputs: Any, input_types: Any, outputs: Any, output_types: Any) -> int:
        """The number of what two ranks must call alike, as text.

        Raises:
            ValueError: the name is no text, or a number has thousands of digits.
        """
        if not isinstance(name, str):
            raise ValueError("no name")
        backend, colon, op = short(name).partition(":")
        if not colon:
            backend, op = "", backend
        self.backends[backend] += 1
        text = op.replace(" ", "_") or "?"
        if inputs or outputs:
            text += f" {_tensors(inputs, input_types)} -> {_tensors(outputs, output_types)}"
        return self.table.shape(text)

    def _caller(self, entry: dict[str, Any]) -> int:
        thread, number, frames = entry.get("thread_name"), entry.get("thread_id"), entry.get("frames")
        if not isinstance(thread, str):
            thread = ""
        if not isinstance(number, str):
            number = ""
        if frames:
            return self.table.caller(_thread(thread, number), _stack(frames))
        caller = self.callers.get((thread, number))
        if caller is None:
            caller = self.callers[thread, number] = self.table.caller(_thread(thread, number), ())
        return caller

    def _p2p(self, calls: _Calls, seq: int, shape: int, progress: int, caller: int, at: int) -> None:
        text = self.table.shape_texts[shape]
        thread, stack = self.table.callers[caller]
        call = Call(
            seq=seq,
            op=text.partition(" ")[0].replace("_", " ", 1),
            shape=text,
            state=STATES[progress % RETIRED],
            is_retired=bool(progress & RETIRED),
            is_p2p=True,
            at=self._at(at),
            thread=thread,
            stack=stack,
        )
        calls.p2p_count += 1
        calls.p2p.append(call)
        if len(calls.p2p) > 2 * P2P_KEPT:
            old, new = calls.p2p[:-P2P_KEPT], calls.p2p[-P2P_KEPT:]
            calls.p2p = [one for one in old if not (one.is_retired or one.state == "completed")] + new

    def _groups(self, document: dict[str, Any], backend: str) -> Iterator[Progress]:
        config = _config(document.get("pg_config"))
        status = _status(document.get("pg_status"))
        named: dict[tuple[str, str], _Calls] = {}
        for key, used in self.groups.items():
            # A name with strange characters is kept under two keys, the one that is shown first.
            if all(used is not other for other in named.values()):
                named[key] = used
        links = self._links(config, status, named)
        keys = [*named, *(key for key in config if key not in named)]
        for key in keys:
            calls = named.get(key)
            group = Group(*key, config.get(key))
            yield self._progress(group, calls, status.get(links.get(key, -1)), backend)

    def _links(
        self,
        config: Mapping[tuple[str, str], tuple[int, ...] | None],
        status: Mapping[int, tuple[int, int, int]],
        named: Mapping[tuple[str, str], _Calls],
    ) -> dict[tuple[str, str], int]:
        """The local number of each group, as far as it can be told."""
        links = {key: calls.pg_id for key, calls in named.items() if calls.pg_id in status}
        numbers = [key for key in config if key[0].isdecimal() and len(key[0]) < 16]
        if len(links) == len(config) or len(numbers) != len(config) or len(config) != len(status):
            return links
        ordered = dict(zip(sorted(numbers, key=lambda key: int(key[0])), sorted(status), strict=True))
        if len({key[0] for key in numbers}) == len(numbers) and all(
            ordered.get(key) == number for key, number in links.items()
        ):
            self.notes.append("groups without a call in the ring: their states are told by the groups' order")
            return ordered
        return links

    def _progress(
        self, group: Group, used: _Calls | None, status: tuple[int, int, int] | None, backend: str
    ) -> Progress:
        enqueued, started, completed = status or (-1, -1, -1)
        if used is None:
            return Progress(group, -1, -1, max(enqueued, completed), started, completed, self.at)
        calls = used.calls
        calls.close()
        if used.p2p_count:
            # The numbers of its status are those of whatever call came last.
            enqueued = started = completed = -1
        first = last = -1
        if calls:
            seqs = list(calls)
            first, last = seqs[0], seqs[-1]
            open_seqs = calls.open_seqs(is_retired_done=backend == "gloo")
            own = open_seqs[0] - 1 if open_seqs else last
            # gloo's status lags by one behind what has ended; its entries do not.
            completed = own if backend == "gloo" else max(completed, own if not open_seqs else -1)
            if completed < 0 and open_seqs:
                completed = own
            enqueued = max(enqueued, last, completed)
        return Progress(
            group=group,
            first=first,
            last=last,
            enqueued=max(enqueued, completed),
            started=started,
            completed=completed,
            at=self._at(used.last_record),
            calls=calls,
            p2p=tuple(used.p2p),
        )


STATE_NUMBERS = {state: number for number, state in enumerate(STATES)}


def _tensors(sizes: Any, types: Any) -> str:
    """`4x2:Float,8:Long`: dimensions and type of each tensor."""
    shown = []
    for at, size in enumerate(sizes[:TENSORS_SHOWN_MAX]):
        kind = types[at] if at < len(types) else "?"
        dimensions = "x".join(str(one) if type(one) is int else "?" for one in size)
        shown.append(f"{dimensions or '1'}:{short(kind).replace(' ', '_') if isinstance(kind, str) else '?'}")
    if len(sizes) > TENSORS_SHOWN_MAX:
        shown.append(f"and_{len(sizes) - TENSORS_SHOWN_MAX}_more")
    return ",".join(shown) or "-"


def _thread(name: str, number: str) -> str:
    """`python (14003)`: names are often the same for all threads of a process."""
    return short(f"{name} ({number})" if name and number else name or number)


def _stack(frames: Any) -> tuple[str, ...]:
    """Frames of the caller outside of torch, innermost first."""
    if not isinstance(frames, list):
        return ()
    stack = []
    for frame in frames[:FRAMES_MAX]:
        if isinstance(frame, dict) and isinstance(file := frame.get("filename"), str):
            if any(part in file for part in TORCH):
                continue
            line, name = count_of(frame.get("line"), COUNT_MAX), frame.get("name")
            end = "/".join(file.rsplit("/", 2)[-2:])
            stack.append(short(f"{end}:{line or 0} {name if isinstance(name, str) else '?'}"))
    return tuple(stack)


def _config(config: Any) -> dict[tuple[str, str], tuple[int, ...] | None]:
    """(name, description) -> members, None where the dump does not say."""
    found: dict[tuple[str, str], tuple[int, ...] | None] = {}
    if not isinstance(config, dict):
        return found
    for key, about in config.items():
        if not isinstance(about, dict):
            continue
        name, description = about.get("name", key), about.get("desc", "")
        if isinstance(name, str) and isinstance(description, str) and (name or description):
            found[short(name), short(description)] = _members(about.get("ranks"))
    return found


def _members(ranks: Any) -> tuple[int, ...] | None:
    """Members in group order, of a text such as `[0, 1]`; None where it is none such."""
    if isinstance(ranks, str) and len(ranks) < 16 * MEMBERS_MAX:
        ranks = ranks.strip().strip("[]()").split(",")
    if not isinstance(ranks, (list, tuple)) or len(ranks) > MEMBERS_MAX:
        return None
    members = [count_of(each.strip() if isinstance(each, str) else each, RANK_MAX) for each in ranks]
    known = [member for member in members if member is not None]
    return tuple(known) if known and len(known) == len(members) == len(set(known)) else None


def _status(status: Any) -> dict[int, tuple[int, int, int]]:
    """Local number -> last enqueued, started, completed; -1 for none."""
    found: dict[int, tuple[int, int, int]] = {}
    if not isinstance(status, dict):
        return found
    for key, about in status.items():
        number = count_of(key, COUNT_MAX)
        if number is not None and isinstance(about, dict):
            told = [count_of(about.get(f"last_{what}_collective"), COUNT_MAX) for what in MOMENTS]
            found[number] = tuple(-1 if one is None else one for one in told)  # type: ignore[assignment]
    return found


MOMENTS = ("enqueued", "started", "completed")


def count_of(value: Any, most: int) -> int | None:
    """A number from 0 to `most`, also where it is written as text; None otherwise."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdecimal() and len(value) <= 16 else None
    return value if type(value) is int and 0 <= value <= most else None


def short(text: str) -> str:
    """Somebody else's text as it may be shown."""
    return printable(text[:TEXT_CHARS_MAX])
