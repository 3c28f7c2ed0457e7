"""Rule `line_mismatch`: ranks made different calls at one place of one group, as their own error lines say.

Equation, for a group, a sequence number s and ranks a, b that each have a line of s:

    op(a, s) = op(b, s)
    size(a, s) = size(b, s)     for ops in which all have to bring as much

    rank 0  WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=4096, ..)
    rank 1  WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=4352, ..)     rank 1 brought 256 more
    rank 2  WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=4096, ..)

NCCL's watchdog says op and sizes, torch's debug mode a fingerprint of the call. A rank that left out a call
has another one at every number from there on, so the smallest number counts. Older lines do not name their
group: numbers of two groups may be the same there, so nobody is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from consensus_checker.claim import Claim
from consensus_checker.finding import Alternative, Finding
from consensus_checker.said import entries, lines_of, sides_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier, Line

RULE = "line_mismatch"
# In all others a rank may bring more or less than another, or only one brings something.
SAME_SIZE = (
    "ALLREDUCE",
    "ALLREDUCE_COALESCED",
    "BROADCAST",
    "_BROADCAST_OOP",
    "REDUCE",
    "_REDUCE_OOP",
    "BARRIER",
)
POINT_TO_POINT = ("SEND", "RECV", "COALESCED", "UNKNOWN", "")
SHAPE_CHARS_MAX = 60
# What stands for the group where torch's debug mode speaks, which does not name it.
DEBUG = "of the debug mode"

# What a rank called, in words, and where it says so.
Calls = dict[int, tuple[str, Line]]


def find(dossier: Dossier) -> list[Claim]:
    """The first place of each group at which its ranks' calls differ."""
    claims: dict[str, Claim] = {}
    for group, seq, calls in sorted(_places(dossier), key=lambda place: place[:2]):
        if group not in claims and (claim := _judged(dossier, group, seq, calls)) is not None:
            claims[group] = claim
    return sorted(claims.values(), key=lambda claim: not claim.finding.culprit)


def _places(dossier: Dossier) -> Iterator[tuple[str, int, Calls]]:
    """Group, sequence number, and each rank's call there."""
    timed_out: dict[tuple[str, str, int], dict[int, Line]] = {}
    for line in lines_of(dossier, ("watchdog_timeout",)):
        seq, op = line.fields["seq"], line.fields["op"]
        if line.who.rank is not None and seq is not None and op.upper() not in POINT_TO_POINT:
            key = (line.fields["group"], line.fields["description"], seq)
            timed_out.setdefault(key, {})[line.who.rank] = line
    for (name, description, seq), lines in timed_out.items():
        group = " ".join(filter(None, (name, f"({description})" if description else "")))
        yield group, seq, {rank: (_work(line), line) for rank, line in lines.items()}
    printed: dict[int, Calls] = {}
    for line in lines_of(dossier, ("debug_mismatch",)):
        for part in (line.fields["one"], line.fields["other"]):
            if part["rank"] is not None and part["seq"] is not None:
                text = f"{part['op']} {part['shape'] or ''} {part['dtype'] or ''}"
                own = (" ".join(text[:SHAPE_CHARS_MAX].split()), line)
                printed.setdefault(part["seq"], {}).setdefault(part["rank"], own)
    for seq, calls in printed.items():
        yield DEBUG, seq, calls


def _work(line: Line) -> str:
    op = str(line.fields["op"])
    sizes = (line.fields["numel_in"], line.fields["numel_out"])
    if op.upper() not in SAME_SIZE or None in sizes:
        return op
    return (
        f"{op} of {sizes[0]:,} elements" if sizes[0] == sizes[1] else f"{op} of {sizes[0]:,} to {sizes[1]:,}"
    )


def _group(name: str) -> str:
    if name == DEBUG:
        return "a group that the debug mode does not name"
    return f"group {name}" if name else "a group without a name"


def _judged(dossier: Dossier, group: str, seq: int, calls: Mapping[int, tuple[str, Line]]) -> Claim | None:
    sides = sides_of({rank: call for rank, (call, _line) in calls.items()})
    if not sides.is_split:
        return None
    lines = {rank: line for rank, (_call, line) in calls.items()}
    told = "; ".join(f"{ranks_text(ranks)} {call}" for call, ranks in sides.sides[:4])
    odd = sides.odd if group else ()
    unknown = () if odd else sides.ranks
    is_size = len({call.split(" ")[0] for call, _ranks in sides.sides}) == 1
    finding = Finding(
        "mismatch",
        16,
        RULE,
        f"calls differ at #{seq} of {_group(group)}: {told}",
        "medium" if odd else "undetermined",
        basis=(f"majority {len(sides.others)}/{len(calls)}" if odd else f"{len(calls)} ranks, no majority",),
        # Sizes that differ come of a decision about tokens, other ops of a call left out.
        resembles=("HC02",) if is_size else ("HC01", "HC03"),
        culprit=odd,
        victims=sides.others if odd else (),
        unknown=unknown,
        evidence=(
            *entries(dossier, lines, odd, "culprit"),
            *entries(dossier, lines, sides.others if odd else (), "victim"),
            *entries(dossier, lines, unknown, "unknown"),
        ),
        alternatives=(
            Alternative("a call that was left out or made twice before it shifts all that follow", RULE),
        ),
    )
    return Claim(finding)
