"""Operating errors of the tracer: something outside the program is not as it should be.

Owns the exception tree. Anomalies found inside a log (a gap, a torn line, a missing rank) are never
raised: they are values that the reader reports.
"""

from __future__ import annotations


class TracerError(Exception):
    """What is wrong, where, and what to try; printed as one line a part.

    Args:
        what: one line with the numbers or names that matter.
        where: file, record or statement it was found in.
        expected: what a right input would have looked like.
        hint: what to do about it, printed behind `try`.
    """

    def __init__(self, what: str, *, where: str = "", expected: str = "", hint: str = "") -> None:
        parts = (("where", where), ("expected", expected), ("try", hint))
        super().__init__("\n".join([what, *(f"  {label:<9} {text}" for label, text in parts if text)]))
        self.what = what
        self.where = where
        self.expected = expected
        self.hint = hint


class LogError(TracerError):
    """The input holds no log that can be read: nothing there, not ours, or another major version."""


class ElsewhereError(LogError):
    """What was asked for is in another folder, `place`, as it can be pasted into a shell."""

    def __init__(self, what: str, place: str, *, expected: str = "") -> None:
        super().__init__(what, expected=expected, hint=f"hicache check {place}")
        self.place = place


class StoreError(TracerError):
    """A query was refused or failed, or a log could not be loaded into the store."""


class HitsError(TracerError):
    """The hit analysis was asked for something it can't answer from these logs."""
