"""How two lockstep sequences part: one of five kinds, by a short look ahead.

value        same kind and phase, other compared fields
missing      the odd rank lacks one call (1..n records) and then goes on like the others
extra        the odd rank has one call more and then goes on like the others
collective   a meeting stands against something else, or against another meeting
order        anything else
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from consensus_checker.finding import DivergenceKind
from consensus_checker.rules.agreement import Key

# A call is rarely more than this many records; beyond it "one more call" explains nothing.
CALL_RECORDS_MAX = 8
# Records that must go on alike; fewer where a log ends.
ALIKE = 3


def _whole(key: Key) -> Key:
    return key


def classify(
    majority: Sequence[Key],
    odd: Sequence[Key],
    meetings: frozenset[str],
    shape: Callable[[Key], Key] = _whole,
) -> DivergenceKind:
    """Compare two sequences that start at the first difference.

    Args:
        shape: a key without what shifts where a call is left out, such as counters; two sequences go on
            alike if their shapes do.
        majority, odd: keys from the difference on; empty when the lane was closed there.
        meetings: kinds with role `meeting`.
    """
    if not odd:
        return "missing"
    if not majority:
        return "extra"
    here, there = majority[0], odd[0]
    is_meeting = here[0] in meetings or there[0] in meetings
    if here[:2] == there[:2]:
        # Two meetings with other purpose, or two calls that are alike but for a value.
        if is_meeting:
            return "collective"
        shifts = (_skip(majority, odd, same_kind=True), _skip(odd, majority, same_kind=True))
        if shifts == (None, None) and (shape is _whole or shape(here) == shape(there)):
            return "value"
    majority, odd = [shape(key) for key in majority], [shape(key) for key in odd]
    if here[0] not in meetings and _skip(majority, odd, same_kind=False) is not None:
        return "missing"
    if there[0] not in meetings and _skip(odd, majority, same_kind=False) is not None:
        return "extra"
    if here[:2] == there[:2] and not is_meeting:
        return "value"
    return "collective" if is_meeting else "order"


def _skip(longer: Sequence[Key], shorter: Sequence[Key], *, same_kind: bool) -> int | None:
    """How many records of `longer` to leave out for it to go on like `shorter`.

    Two records of one kind are one call with two results unless what follows proves a shift, so
    then a whole stretch must match.
    """
    alike_min = ALIKE if same_kind else 2
    for skipped in range(1, CALL_RECORDS_MAX + 1):
        rest = longer[skipped : skipped + ALIKE]
        alike = min(len(rest), len(shorter))
        # A log that was cut or hangs shows less; one record alike is enough for one record left out,
        # unless that one comes later in the other log: then the two have changed places.
        is_short = alike == 1 == skipped and not same_kind and longer[0] not in shorter
        enough = alike >= alike_min or is_short
        if enough and list(rest[:alike]) == list(shorter[:alike]):
            return skipped
    return None
