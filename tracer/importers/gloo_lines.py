"""What gloo says when a collective between processors fails.

    gloo_timeout          waited for a peer that did not come        direction timeout_ms
    gloo_size_mismatch    was sent more than it had room for         sent_bytes own_bytes
    gloo_closed           a peer's process is gone                   peer
    gloo_reset            a peer's process went in the middle        peer
    gloo_lost             the connection is lost in another way      peer
    gloo_abort            the process ends itself because of gloo    type

None of these lines says which rank the peer is, and a process that ends itself closes all its connections:
who reports a closed one is a victim of whoever was first. It reads, and judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tracer.errors import HitsError
from tracer.importers.dossier import Dossier
from tracer.importers.launcher_lines import ADDRESS, Reading, Text, count, holds, refused
from tracer.importers.sniff import File

FORMAT = "gloo_log"
VERSION = 1

TIMED_OUT = re.compile(r"Timed out waiting (\d{1,15}) ?ms for (recv|send) operation")
TOO_LARGE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d{1,18}) vs (\d{1,18})")
ABORT = re.compile(r"terminate called after throwing an instance of '(?:gloo|::gloo)::(\w{1,60})'")
CLOSED = re.compile(r"Connection closed by peer(?: (?P<peer>\S{3,60}))?")
RESET = re.compile(
    r"(?P<peer>\[[\d.:a-fA-F]{3,45}\]:\d{1,5}|\S{3,60}): (?:Connection reset by peer|Broken pipe)"
)

Found = Iterator[tuple[str, dict[str, Any]]]


def _words() -> dict[bytes, Callable[[Text], Found]]:
    return {
        b"Timed out waiting ": _timed_out,
        b"op.nbytes. ": _too_large,
        b"terminate called after throwing": _abort,
        b"Connection closed by peer": _closed,
        b"Connection reset by peer": _reset,
        b"Broken pipe": _reset,
        b"Application timeout caused pair closure": _lost,
    }


def votes(head: bytes) -> int:
    return holds(head, (*_words(), b"/gloo/transport/"))


def read(file: File, index: int, into: Dossier) -> None:
    reading = Reading(file, index, into)
    words = _words()
    try:
        for text in reading.texts(tuple(words)):
            for word, reader in words.items():
                if word.decode() in text.text:
                    for event, fields in reader(text):
                        reading.add(text, event, fields)
    except (HitsError, OSError) as error:
        reading.settle(FORMAT, VERSION)
        refused(into, index, error)
        return
    reading.settle(FORMAT, VERSION)


def _timed_out(text: Text) -> Found:
    if found := text.match(TIMED_OUT):
        yield "gloo_timeout", {"timeout_ms": count(found[1]), "direction": found[2]}


def _too_large(text: Text) -> Found:
    if found := text.match(TOO_LARGE):
        yield "gloo_size_mismatch", {"sent_bytes": count(found[1]), "own_bytes": count(found[2])}


def _abort(text: Text) -> Found:
    if found := text.match(ABORT):
        yield "gloo_abort", {"type": found[1]}


def _closed(text: Text) -> Found:
    # Servers lose connections to clients all the time.
    if _is_gloo(text) and (found := text.match(CLOSED)):
        yield "gloo_closed", {"peer": _address(found["peer"] or "")}


def _reset(text: Text) -> Found:
    if _is_gloo(text) and (found := text.match(RESET)):
        yield "gloo_reset", {"peer": _address(found["peer"] or "")}


def _lost(text: Text) -> Found:
    if _is_gloo(text):
        yield "gloo_lost", {"peer": _address(text.text)}


def _is_gloo(text: Text) -> bool:
    return "gloo" in text.text


def _address(text: str) -> str:
    """Address and port of the peer, whom no line calls by its rank."""
    found = ADDRESS.search(text)
    return f"{found[1]}:{found[2]}" if found else ""
