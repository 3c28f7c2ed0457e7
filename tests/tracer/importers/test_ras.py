from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.foreign_lines import poll, read
from tracer.importers import ras
from tracer.importers.dossier import At, Poll, Who


def test_polls_one_after_the_other_are_looks(tmp_path: Path) -> None:
    first = poll("2031-02-03 04:05:06", {0: 5, 1: 4})
    second = poll("2031-02-03 04:05:21", {0: 5}, {1: {"unresponsive": True, "considered_dead": False}})
    found = read(ras, tmp_path, json.dumps(first, indent=1) + "\nsome banner\n" + json.dumps(second))
    members = {0: Who(None, 300, "h"), 1: Who(None, 301, "h")}
    counts = {rank: {"AllReduce": count, "Send": rank} for rank, count in ((0, 5), (1, 4))}
    start = 1_927_857_906_000_000_000
    assert [
        Poll(0, "a1/b2", 2, members, counts, {}, start, At(0, 0)),
        Poll(1, "a1/b2", 2, members, {0: counts[0]}, {1: ("unresponsive",)}, start + 15 * 10**9, At(0, 1)),
    ] == found.polls
    assert (found.files[0].format, found.files[0].records, found.files[0].unparsed) == ("nccl_ras", 2, 0)


def test_an_event_is_a_line(tmp_path: Path) -> None:
    event = {"timestamp": "2031-02-03 04:05:06", "group": "lifecycle", "event": "PEER_DEAD", "peer": "::1"}
    told = {"host": "h", "pid": 301, "cuda_devs": "0", "nvml_devs": "0"}
    found = read(ras, tmp_path, json.dumps(event | told))
    (line,) = found.lines
    assert (Who(None, 301, "h"), "ras_event", "PEER_DEAD") == (line.who, line.event, line.fields["event"])


def test_it_is_known_by_what_is_in_it() -> None:
    whole = json.dumps(poll("2031-02-03 04:05:06", {0: 5})).encode()
    assert ras.votes(whole) > 0
    assert [ras.votes(b'{"entries": []}'), ras.votes(b'the "communicators" of "missing_ranks"')] == [0, 0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"communicators": [', "its last document has no end"),
        ("{" * 100, "nested deeper than 64"),
        ('{"a": 1}', "none of its 1 documents is a poll"),
        ('{"communicators": 3}', "none of its 1 documents is a poll"),
    ],
)
def test_what_can_not_be_read_is_refused_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    refused = read(ras, tmp_path, text).files[0].refused
    assert refused is not None and told in refused


def test_what_was_read_before_a_cut_stays(tmp_path: Path) -> None:
    whole = json.dumps(poll("2031-02-03 04:05:06", {0: 5}))
    found = read(ras, tmp_path, whole + whole[:-10])
    assert (
        len(found.polls),
        found.files[0].notes,
    ) == (1, ["read to document 1 only: server.log: its last document has no end"])


def test_brackets_in_strings_are_text_over_parts_of_a_file(tmp_path: Path) -> None:
    document = poll("2031-02-03 04:05:06", {0: 5})
    document["note"] = '}{"\\' + "x" * (1 << 20) + '"}'
    assert len(read(ras, tmp_path, json.dumps(document) * 2).polls) == 2
