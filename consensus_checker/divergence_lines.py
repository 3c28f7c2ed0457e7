"""SGLang's divergence lines in, verdict out: which entry is the first that differs, in what, on which rank.

Each rank prints its own list and none of the others'. The lists of one incident become lanes in memory, one
record an event, and are judged as any other lanes. Beyond that, the hash in each line is evidence of its own:
equal hashes are equal lists, so that a damaged line can be read in the place of a whole one, and lists that
differ in nothing but addresses were a false alarm.

    lines -> ranks -> incidents -> lanes -> check -> verdict, in the words of the lines

No value that could be a prompt comes through: it is a type, a length and a digest under a key of this input.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any

from consensus_checker.check import check
from consensus_checker.explain import INDENT, paragraph, proof
from consensus_checker.finding import Evidence, FieldDiff, Finding
from consensus_checker.history import History, MemoryLane
from consensus_checker.line_ranks import Incident, Seat, Seating, incidents, seated
from consensus_checker.screen import LINES_MAX, first_screen
from consensus_checker.verdict import COVERAGE, Coverage, Verdict
from consensus_checker.words import call_text, ranks_text
from tracer.errors import LogError
from tracer.importers.pieced_lines import ATOMIC_BYTES, put_together
from tracer.importers.python_reprs import REQUEST_NAMES, Digest, Value, elements, normal
from tracer.importers.rank_divergence import Event, Lines, Printed, fields_of, read_lines, texts_of
from tracer.importers.sniff import File
from tracer.record import COMMON, MAIN_LANE, Kind, Place, Record, header

RULE = "agreement"
# Kind of an event that is neither a call nor a return: a text that somebody asserted.
ASSERTED = "assert_same"
HASH_CHARS = 40
DIGEST_SHOWN = 12
FILES_NAMED_MAX = 4
RANKS_NAMED_MAX = 4
LINES_LOOKED_AT = 20
BLIND = "what came before a list, and calls that SGLang does not compare, are not in it"
FALSE_ALARM = "SGLang compares texts: addresses and the order of sets differ between healthy ranks"
ENDED = "  then    the checker ended every process that printed a list, with exit code 1"


@dataclass(frozen=True, slots=True)
class Told:
    """A verdict with what it takes to draw it.

    Attributes:
        history: of the incident that the verdict is about.
        names: rank -> how its log calls it, and where its line is.
        count: events of a list, as most lines state it.
        place: from where on a long value differs, where that is what differs.
    """

    verdict: Verdict
    history: History
    names: Mapping[int, str]
    count: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class _Listed:
    """One rank's list, as far as it can be trusted.

    Attributes:
        source: the line whose events stand here: its own, or a whole one with the same hash.
        events: those that are surely the rank's.
        is_cut: whether events behind these are unknown; is_sure: whether the hash proves them.
    """

    seat: Seat
    source: Printed
    events: tuple[Event, ...]
    is_cut: bool
    is_sure: bool


def judge_lines(paths: Sequence[Path]) -> Told:
    """Judge the divergence lines in the logs of one server.

    Raises:
        LogError: there is no such line, or no file can be read.
    """
    paths = list(dict.fromkeys(paths))
    is_told_by_name = len({path.name for path in paths}) == len(paths)
    lines = read_lines([File(path, path.name if is_told_by_name else str(path)) for path in paths])
    if not lines.printed:
        raise _no_lines(lines)
    lines.printed = put_together(lines.printed)
    seating = seated(lines)
    key = blake2b("".join(sorted(one.hash for one in lines.printed)).encode(), digest_size=32).digest()
    told = [_Incident(incident, seating, lines, key).told() for incident in incidents(seating.seats)]
    first = next((one for one in told if one.verdict.code == 10), told[0])
    others = [one.verdict.finding for one in told if one is not first]
    return replace(first, verdict=replace(first.verdict, findings=(*first.verdict.findings, *others)))


def lines_screen(told: Told) -> list[str]:
    """The first screen, with the ranks as their logs call them; a list has no steps."""
    screen: list[str] = []
    is_why = False
    for line in first_screen(told.verdict, told.history):
        is_why = line.startswith("  why") or (is_why and line.startswith(" " * INDENT))
        if not is_why:
            screen.append(ENDED if line.startswith("  then") else without_steps(line, told.count))
        elif line.startswith("  why"):
            screen += paragraph("why", _why(told), lines_max=3)
    at = next((at for at, line in enumerate(screen) if line.startswith("  unsure")), len(screen))
    names = _ranks(told)[: max(1, LINES_MAX - len(screen))]
    return [*screen[:at], *names, *screen[at:]]


def _why(told: Told) -> str:
    first = told.verdict.finding.first_divergence
    about = f"{first.about}: " if first is not None and first.about else ""
    return about + (told.place or "the lists hold no local facts; what made a rank decide so is not there")


def _ranks(told: Told) -> list[str]:
    """Who is who, the odd ranks first."""
    odd = told.verdict.finding.culprit
    shown = (*odd, *(rank for rank in told.names if rank not in odd))[:RANKS_NAMED_MAX]
    lines = [f"{('' if at else '  ranks').ljust(INDENT)}{told.names[rank]}" for at, rank in enumerate(shown)]
    if more := len(told.names) - len(shown):
        lines[-1] += f", and {more} more"
    return lines


def argument(told: Told) -> list[str]:
    """The argument for every finding, step by step."""
    lines: list[str] = []
    for finding in (told.verdict.finding, *told.verdict.findings):
        lines += ["", *(without_steps(line, told.count) for line in proof(finding, told.history))]
    return lines


def without_steps(line: str, count: int) -> str:
    """A line of a screen without the step, which these records do not have."""
    return line.replace(", step 0", f" of {count}" if line.rstrip().endswith(", step 0") else "")


def _no_lines(lines: Lines) -> LogError:
    names = list(lines.lines)
    counts = {name: "1 line" if count == 1 else f"{count:,} lines" for name, count in lines.lines.items()}
    shown = ", ".join(f"{name} ({counts[name]})" for name in names[:FILES_NAMED_MAX])
    if len(names) > FILES_NAMED_MAX:
        shown += f" and {len(names) - FILES_NAMED_MAX:,} more files"
    hint = "the logs of a server that ran with SGLANG_ENABLE_RANK_CONSENSUS_CHECKER=1, of every rank"
    if lines.is_enabled:
        hint = "nothing: the checker was on in that server, and had printed no divergence up to there"
    return LogError(
        "no line of SGLang's rank consensus checker, and no log of this tool's",
        where="; ".join([shown or "no file", *lines.notes[:FILES_NAMED_MAX]]),
        expected="Found rank divergence for N events(s)! local hash: HEX, events = [...]",
        hint=hint,
    )


class _Incident:
    """The lines of one incident on their way to a verdict."""

    def __init__(self, incident: Incident, seating: Seating, lines: Lines, key: bytes) -> None:
        self.seating = seating
        self.lines = lines
        self.key = key
        self.seats = [incident.seats[rank] for rank in sorted(incident.seats)]
        self.expected = seating.expected.get(incident.replica, ())
        in_file = Counter(one.file.path for one in lines.printed)
        self.listed = {
            seat.rank: _listed(seat, self.seats, in_file[seat.printed.file.path]) for seat in self.seats
        }
        counts = [seat.printed.count for seat in self.seats]
        self.count = max(counts, key=counts.count)
        self.place = ""

    def told(self) -> Told:
        history = History.of(self._lanes())
        verdict = check(history)
        if verdict.finding.kind == "divergence":
            finding = self._differs(verdict.finding)
        else:
            finding = self._agrees()
            finding = replace(finding, evidence=self._evidence([one.supports for one in finding.evidence]))
        coverage = self._coverage(verdict.coverage)
        told = Verdict(finding, coverage, (), self._next(finding))
        return Told(
            told, history, {seat.rank: self._name(seat) for seat in self.seats}, self.count, self.place
        )

    # Lanes

    def _lanes(self) -> list[MemoryLane]:
        kinds = self._kinds()
        sizes = self.seating.sizes
        return [
            MemoryLane(
                seat.rank,
                MAIN_LANE,
                header(
                    Place(seat.rank, {axis: seat.place[axis] for axis in sizes}, sizes, {}),
                    list(kinds.values()),
                    lane=MAIN_LANE,
                    run_id="lines",
                    tool_version="",
                ),
                kinds,
                [self._record(at, event) for at, event in enumerate(self.listed[seat.rank].events)],
            )
            for seat in self.seats
        ]

    def _kinds(self) -> dict[str, Kind]:
        """Each function as a kind of record, with every field that one of its events has."""
        fields: dict[str, dict[str, None]] = {}
        for listed in self.listed.values():
            for event in listed.events:
                own = fields.setdefault(event.name or ASSERTED, {})
                own.update(dict.fromkeys(_names(list(event.fields))))
        agree = ("pp", "cp", "tp")
        return {
            # What a call is about comes first: a row is known by it.
            name: Kind(name, "decision", agree, tuple(sorted(own, key=lambda field: field != "rid")))
            for name, own in fields.items()
        }

    def _record(self, seq: int, event: Event) -> Record:
        record: dict[str, Any] = {"seq": seq, "step": 0, "time_ns": 0, "kind": event.name or ASSERTED}
        if event.phase:
            record["phase"] = event.phase
        for name, value in zip(_names(list(event.fields)), event.fields.values(), strict=True):
            record[name] = self._shown(value)
        return record

    def _shown(self, value: Value) -> Any:
        if not isinstance(value, Digest):
            return value
        digest = blake2b(value.digest, key=self.key, digest_size=DIGEST_SHOWN // 2).hexdigest()
        return f"{value.type}[{value.length}]{'...' if value.is_elided else ''} {digest}"

    # A list that differs

    def _differs(self, finding: Finding) -> Finding:
        """The checker's own finding, in what these lines allow to say."""
        first = finding.first_divergence
        assert first is not None
        is_tie = finding.basis[0].startswith("tie")
        if is_tie and finding.culprit:
            # What was done before in one short batch is no reason to accuse one of two sides.
            ranks = tuple(sorted(first.by_rank))
            finding = replace(finding, culprit=(), victims=(), unknown=ranks, level="undetermined")
            diffs = tuple(
                FieldDiff(diff.field, None, {rank: first.by_rank[rank].get(diff.field) for rank in ranks})
                for diff in first.field_diff
            )
            finding = replace(finding, first_divergence=replace(first, field_diff=diffs))
        summary = without_steps(finding.summary.replace(", step 0,", f" of {self.count},"), self.count)
        if is_tie:
            sides = " against ".join(ranks_text(side) for side in _sides(first.by_rank))
            where = f"call {first.index} ({call_text(first.call)}) of {self.count}, scope {first.scope}"
            summary = f"{sides}: they part at {where}; the lists alone do not say who is right"
        self.place = self._place_of_difference(finding) if first.kind == "value" else ""
        if self.place:
            summary += f"; {self.place}"
        basis = [text for text in finding.basis if not text.startswith(("no local fact", "precedent"))]
        unproven = [rank for rank in sorted(first.by_rank) if not self.listed[rank].is_sure]
        if unproven:
            basis.append(f"the hash of {ranks_text(unproven)} does not prove the list")
        elif finding.culprit:
            basis.append("every list gives its hash")
        if finding.culprit:
            finding = replace(finding, level="low" if unproven else finding.level)
        return replace(
            finding,
            summary=summary,
            basis=tuple(basis),
            evidence=self._evidence([entry.supports for entry in finding.evidence]),
        )

    def _place_of_difference(self, finding: Finding) -> str:
        """Where in a long value two ranks part, for the first field that has one; "" where none has."""
        first = finding.first_divergence
        assert first is not None
        sides = _sides(first.by_rank)
        if len(sides) < 2:
            return ""
        texts = []
        for rank in (sides[0][0], sides[1][0]):
            found = fields_of("".join(texts_of(self.listed[rank].source, first.index)))
            own = zip(_names([leaf.name for leaf in found]), found, strict=True)
            texts.append({name: leaf.text for name, leaf in own if not leaf.is_type})
        for diff in first.field_diff:
            one, two = (own.get(diff.field) for own in texts)
            values = (first.by_rank[side[0]].get(diff.field) for side in sides[:2])
            if one is not None and two is not None and all(_is_digest(value) for value in values):
                return f"{diff.field} differs from {_first_difference(one, two)} on"
        return ""

    # Lists in which nothing differs

    def _agrees(self) -> Finding:
        ranks = tuple(seat.rank for seat in self.seats)
        silent = self._silent()
        if len(ranks) == 1:
            what = f"only {ranks_text(ranks)} printed its list in these files: it has no partner"
            return Finding("nothing_compared", 4, COVERAGE, what, "undetermined", silent=silent)
        hashes = {seat.rank: seat.printed.hash for seat in self.seats if len(seat.printed.hash) == HASH_CHARS}
        sides = _sides(hashes)
        compared = min(len(listed.events) for listed in self.listed.values())
        if len(sides) == 1 and len(hashes) == len(ranks):
            what = f"{ranks_text(ranks)} printed the same hash: who differs from them is not in these files"
            return self._undetermined(what, ("hash",), unknown=silent)
        told = " against ".join(ranks_text(side) for side in sides) or "no hash is whole"
        if cut := tuple(rank for rank in ranks if self.listed[rank].is_cut):
            return self._hidden(sides, cut, compared)
        lengths = {rank: len(listed.events) for rank, listed in self.listed.items()}
        rows = zip(*(listed.events for listed in self.listed.values()), strict=False)
        at = next((at for at, row in enumerate(rows) if len({event.raw for event in row}) > 1), compared)
        if at == compared and len(set(lengths.values())) > 1:
            short = tuple(rank for rank in ranks if lengths[rank] == compared)
            what = (
                f"{told}: the lists are equal as far as they go, and that of {ranks_text(short)} ends after "
                f"{compared} of {max(lengths.values())} calls: as one does that is shut down in the middle"
            )
            return self._undetermined(what, ("hash",), unknown=ranks)
        if at == compared:
            what = f"the hashes differ, {told}, and the lists of {compared} calls do not: a line was edited"
            return self._undetermined(what, ("hash",), unknown=ranks)
        call = self.listed[ranks[0]].events[at].name or ASSERTED
        what = (
            f"{told}: the lists differ only in addresses or the order of sets, first at call {at} "
            f"({call_text(call)}) of {self.count}: a false alarm, as far as they show"
        )
        found = self._undetermined(what, ("hash", "events compared without addresses"), unknown=ranks)
        return replace(found, ruled_out=(("another decision", FALSE_ALARM),))

    def _hidden(self, sides: Sequence[Sequence[int]], cut: tuple[int, ...], compared: int) -> Finding:
        """The hashes differ, and the place at which the lists do is in a part that cannot be read."""
        ranks = tuple(seat.rank for seat in self.seats)
        silent = self._silent()
        odd = tuple(sorted(rank for side in sides[1:] for rank in side))
        total = len(ranks) + len(silent)
        read = f"equal as far as they can be read ({compared} of {self.count} calls)"
        where = f"{read}: that of {ranks_text(cut)} is cut"
        counts = {seat.printed.count for seat in self.seats}
        if len(sides) < 2 or 2 * len(sides[0]) <= total or len(counts) > 1:
            told = " against ".join(ranks_text(side) for side in sides)
            told = f"the hashes differ, {told}; " if len(sides) > 1 else ""
            return self._undetermined(f"{told}the lists are {where}", ("hash",), unknown=ranks)
        return Finding(
            "divergence",
            10,
            RULE,
            f"{ranks_text(odd)} left the majority ({len(sides[0])} of {total}) by the hash of its list; "
            f"where is not known: the lists are {where}",
            "low",
            (f"majority {len(sides[0])}/{total}", "hashes alone"),
            culprit=odd,
            silent=silent,
            evidence=(
                *(Evidence(None, None, f"culprit {rank}") for rank in odd),
                Evidence(None, None, f"majority {sides[0][0]}"),
            ),
        )

    def _undetermined(self, what: str, basis: tuple[str, ...], *, unknown: tuple[int, ...]) -> Finding:
        silent = self._silent()
        named = tuple(rank for rank in unknown if rank not in silent)
        return Finding("undetermined", 20, RULE, what, "undetermined", basis, unknown=named, silent=silent)

    # What stands around it

    def _silent(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.expected if rank not in self.listed)

    def _evidence(self, roles: Sequence[str]) -> tuple[Evidence, ...]:
        """A line of a log for each rank that is named; for every rank where none is."""
        supports = list(roles) or [
            *(f"unknown {seat.rank}" for seat in self.seats),
            *(f"silent {rank}" for rank in self._silent()),
        ]
        entries = []
        for text in supports:
            role, _, number = text.partition(" ")
            listed = self.listed.get(int(number.partition(":")[0]))
            if listed is None:
                entries.append(Evidence(None, None, f"{text}: no divergence line of this rank"))
                continue
            seat = listed.seat
            entries.append(
                Evidence(seat.printed.file.name, seat.printed.line, f"{role} {seat.rank}: {seat.name}")
            )
        return tuple(entries)

    def _name(self, seat: Seat) -> str:
        return f"{seat.rank} is {seat.name} ({seat.printed.file.name}:{seat.printed.line})"

    def _coverage(self, coverage: Coverage) -> Coverage:
        doubts = [*self.seating.notes, *self.lines.notes]
        for seat in self.seats:
            printed, listed = seat.printed, self.listed[seat.rank]
            who = f"rank {seat.rank}"
            if printed.is_pieced:
                doubts.append(f"{who}: its list went through a pipe in pieces, put together as its hash says")
            elif printed.damage and listed.source is not printed:
                doubts.append(f"{who}: {printed.damage}; read as the list with its hash")
            elif printed.damage:
                doubts.append(
                    f"{who}: {printed.damage}, after {len(listed.events)} of {printed.count} events"
                )
            elif len(printed.hash) != HASH_CHARS:
                doubts.append(f"{who}: its hash has {len(printed.hash)} characters, not {HASH_CHARS}")
            elif not printed.is_proven and listed.source is printed:
                doubts.append(f"{who}: its list does not give its hash: damaged or edited")
            if not printed.damage and len(printed.events) != printed.count:
                doubts.append(f"{who}: it says {printed.count} events and lists {len(printed.events)}")
        if len({seat.printed.count for seat in self.seats}) > 1:
            doubts.append("the lines state different numbers of events")
        doubts.append(BLIND)
        return replace(
            coverage,
            ranks_expected=len(self.expected),
            ranks_seen=len(self.seats),
            missing=self._silent(),
            truncated=tuple(rank for rank, listed in self.listed.items() if listed.is_cut),
            doubts=tuple(dict.fromkeys(doubts)),
        )

    def _next(self, finding: Finding) -> tuple[tuple[str, str], ...]:
        """What stands in the log of the rank in question before any list."""
        ranks = finding.culprit[:1] or tuple(rank for rank in finding.unknown if rank in self.listed)[:2]
        printed = [self.listed[rank].seat.printed for rank in ranks]
        commands: dict[str, str] = {}
        for rank, one in zip(ranks, printed, strict=True):
            path = one.file.path
            first = min(other.line for other in self.lines.printed if other.file.path == path)
            if first == 1:
                continue
            span = f"sed -n {max(1, first - LINES_LOOKED_AT)},{max(1, first - 1)}p"
            quoted = shlex.quote(str(path))
            command = f"zcat {quoted} | {span}" if path.suffix == ".gz" else f"{span} {quoted}"
            commands.setdefault(
                command, f"what was logged before the list of rank {rank}: the cause is older"
            )
        return tuple(commands.items())


def _listed(seat: Seat, seats: Sequence[Seat], in_file: int) -> _Listed:
    """A rank's list, or one with the same hash where its own is damaged.

    A long line goes through a pipe in pieces. Where several ranks wrote into one, a piece of another's may
    stand in a list without a mark: of such a list, unless its hash proves it, only that counts which the
    others have too.
    """
    own = seat.printed
    source = own
    if not own.is_proven and len(own.hash) == HASH_CHARS:
        same = [other.printed for other in seats if other.printed.hash == own.hash]
        source = max(same, key=lambda one: (one.is_proven, one.is_whole, len(one.events), one is own))
    if source.is_proven or in_file < 2 or source.byte_count <= ATOMIC_BYTES:
        return _Listed(seat, source, source.events, not source.is_whole, source.is_proven)
    others = [other.printed for other in seats if other.printed.hash != own.hash]
    others = [one for one in others if one.is_proven] or others
    alike = max((_alike(source.events, one.events) for one in others), default=len(source.events))
    return _Listed(seat, source, source.events[:alike], True, False)


def _alike(one: Sequence[Event], two: Sequence[Event]) -> int:
    """How many events two lists have in common from the first on."""
    pairs = enumerate(zip(one, two, strict=False))
    return next(
        (
            at
            for at, (a, b) in pairs
            if a is not b and (a.name, a.phase, a.fields) != (b.name, b.phase, b.fields)
        ),
        min(len(one), len(two)),
    )


def _sides(values: Mapping[int, Any]) -> list[list[int]]:
    """Ranks with equal values, the largest side first."""
    sides: dict[str, list[int]] = {}
    for rank in sorted(values):
        sides.setdefault(repr(values[rank]), []).append(rank)
    return sorted(sides.values(), key=lambda ranks: -len(ranks))


def _names(names: Sequence[str]) -> list[str]:
    """Names of fields as records have them: the id of a request under its one name, none of those taken."""
    found: list[str] = []
    for name in names:
        if name.rpartition(".")[2] in REQUEST_NAMES and "rid" not in found:
            name = "rid"
        elif name in (*COMMON, "phase", "rid"):
            name += "_"
        found.append(name)
    return found


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and "] " in value


def _first_difference(one: str, two: str) -> str:
    """Where two values part: by element where both are collections, else by character."""
    parts = elements(one), elements(two)
    if parts[0] is not None and parts[1] is not None:
        pairs = zip_longest(map(normal, parts[0]), map(normal, parts[1]))
        return f"element {next((at for at, (a, b) in enumerate(pairs) if a != b), 0):,}"
    pairs = zip_longest(normal(one), normal(two))
    return f"character {next((at for at, (a, b) in enumerate(pairs) if a != b), 0):,}"
