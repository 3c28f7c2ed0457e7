"""What torch and NCCL log of a collective that does not end: watchdogs, desync reports, launchers' reports.

    watchdog_timeout    which collective ran too long          seq op numel_in numel_out timeout_ms ran_ms
    watchdog_exception  the group's counters at that time      work enqueued completed
    watchdog_abort      the same, as the process is taken down
    remote_dump         another rank reported first            reporter enqueued completed
    failed_stack        who called the collective that failed  frames
    desync_timeout, desync_joined, desync_finished, desync_missing      one rank's view of all others
    monitored_barrier   the ranks that a barrier waited for    missing timeout_ms
    debug_mismatch      two ranks' calls at one place          one other (rank, seq, op, shape, dtype)
    store_lost          the job's store does not answer
    process_died        a launcher's report of a process       exit_code signal pid
    shutdown            a process was told to end              signal
    exception           an exception that ended something      type is_communication

Three generations of wording are read. The rank in a group's brackets is the rank *in that group*: it is the
global one only where the group is the default one, or none is named; what torch puts in front of the line
always is. It reads, and judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tracer.errors import HitsError
from tracer.importers.dossier import Dossier, Who
from tracer.importers.launcher_lines import Reading, Text, count, holds, ranks_in, refused
from tracer.importers.sniff import File, printable

FORMAT = "torch_log"
VERSION = 1
# Counters of older versions may never have been set.
COUNTER_MAX = 1 << 31
FRAMES_MAX = 64
NAME_CHARS_MAX = 200

# `[PG ID 0 PG GUID 0(default_pg) Rank 1]`, `[PG 1 (tp) Rank 1]`, `[PG 1 Rank 1]`, `[Rank 1]`.
BRACKET = re.compile(
    r"\[(?:PG (?:ID (?P<id>\d{1,9}) PG GUID (?P<guid>[^\s(\]]{1,80})|(?P<old>[^\s(\]]{1,80}))"
    r" ?(?:\((?P<description>[^)\]]{0,120})\))? ?)?Rank (?P<rank>\d{1,7})\]"
)
NUMBER = r"(-?\d{1,20})"
TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: ?WorkNCCL\((?P<work>[^()]*(?:\([^()]*\)[^()]*)*)\)"
    r" ?ran for (?P<ran>\d{1,15}) milliseconds"
)
PAIR = re.compile(r"([A-Za-z]+(?:\(ms\))?)=([^,\s)]{1,60})")
COUNTERS = re.compile(rf"ast enqueued (?:NCCL )?work: {NUMBER}, last completed (?:NCCL )?work: {NUMBER}")
AT_WORK = re.compile(rf"(?:at work(?: sequence id)?|Timeout at NCCL work): {NUMBER}")
SIGNAL = re.compile(rf"due to a collective (?:timeout|failure|exception) from +(?:rank|Rank) {NUMBER}")
STACK = re.compile(r"Stack trace of the failed collective(?P<missing> not found)?")
FRAME = re.compile(r"^\s*#\d{1,4} (?P<func>.{1,200}?) from (?P<file>.{1,400}?):(?P<line>\d{1,9})\s*$")

RANKS = r"\[?(\d{1,7}(?:, ?\d{1,7}){0,4000})\]?"
DESYNC_TIMEOUT = re.compile(
    r"\[(?P<rank>\d{1,7})\] Timeout at collective: (?P<op>[\w:.]{1,80}), #(?P<seq>\d{1,18})"
)
DESYNC_JOINED = re.compile(RANKS + r" joined but didn't finish collective #(\d{1,18})")
DESYNC_FINISHED = re.compile(
    RANKS + r" finished collective #(\d{1,18}), but didn't join collective #(\d{1,18})"
)
DESYNC_MISSING = re.compile(r"[Rr]anks " + RANKS + r" are the lagging ranks that caused this timeout")
BARRIER = re.compile(
    r"(?:\[Rank (?P<rank>\d{1,7})\]: )?Ranks? " + RANKS + r" failed to pass monitoredBarrier in (\d{1,15}) ms"
)
MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (?P<one>\d{1,7}) is running collective: "
    r"CollectiveFingerPrint\((?P<own>.{0,600}?)\), but Rank (?P<two>\d{1,7}) is running collective: "
    r"CollectiveFingerPrint\((?P<other>.{0,600}?)\)(?:\.|\s|$)"
)
PRINT_FIELDS = {
    "seq": re.compile(r"SequenceNumber=(\d{1,18})"),
    "op": re.compile(r"OpType=(\w{1,60})"),
    "shape": re.compile(r"TensorShape=(\[[\d, ]{0,200}\])"),
    "dtype": re.compile(r"TensorDtypes=(\w{1,60})"),
}
CHILD_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,5})\)(?: local_rank: (?P<local>\d{1,6}))?"
    r"(?: \(pid: (?P<pid>\d{1,9})\))?"
)
ROOT_RANK = re.compile(r"^\s*rank +: (\d{1,7}) \(local_rank: (\d{1,6})\)")
ROOT_CODE = re.compile(r"^\s*exitcode +: (-?\d{1,5}) \(pid: (\d{1,9})\)")
CLOSING = re.compile(r"Sending process (?P<pid>\d{1,9}) closing signal (?P<signal>SIG[A-Z]{2,8})")
KILLED = re.compile(
    r"(?:Child process|Subprocess \w+|Process)\b.{0,80}? (?:exit ?code|exitcode)[ =:]+(-?\d{1,5})"
)
RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,100}(?:Error|Exception|Interrupt|Exit)\b)(?P<rest>.*)$")
# Words by which an exception is a report of what another rank, or the network, did not do.
COMMUNICATION = re.compile(
    r"gloo|NCCL|ncclS|ncclR|Connection (?:closed|reset|refused)|TCPStore|\bstore\b|Socket|Broken pipe"
    r"|wait timeout|monitoredBarrier|collective|DistBackend|DistNetwork|DistStore|Timed out waiting",
    re.IGNORECASE,
)
STORE_LOST = re.compile(
    r"TCPStore server has shut down|The client socket has (?:timed out|failed)"
    r"|recvValue(?:WithTimeout)? failed|Failed to check the .{1,3}should dump.{1,3} flag"
    r"|wait timeout after \d+ ?ms, keys|DistStoreError"
)

DEFAULT_GROUPS = ("default_pg", "0", "")


def _words() -> dict[bytes, Callable[[Text], Iterator[tuple[str, dict[str, Any], Who | None]]]]:
    return {
        b"Watchdog caught collective operation timeout": _timeout,
        b"ast enqueued ": _counters,
        b"detected by watchdog at work": _counters,
        b"Stack trace of the failed collective": _stack,
        b"Timeout at collective: ": _desync,
        b" joined but didn't finish collective #": _desync,
        b", but didn't join collective #": _desync,
        b" are the lagging ranks that caused this timeout": _desync,
        b" failed to pass monitoredBarrier in ": _barrier,
        b"Detected mismatch between collectives on ranks": _mismatch,
        b"failed (exitcode: ": _died,
        b"exitcode  : ": _root_cause,
        b" closing signal SIG": _closing,
        b"SIGQUIT received": _sigquit,
        b"Traceback (most recent call last)": _exception,
        b"TCPStore": _store,
        b"The client socket has ": _store,
        b"wait timeout after ": _store,
        b"should dump": _store,
    }


def votes(head: bytes) -> int:
    return holds(head, tuple(_words())) + holds(head, (b"ProcessGroupNCCL.cpp:", b"ProcessGroupGloo"))


def read(file: File, index: int, into: Dossier) -> None:
    reading = Reading(file, index, into)
    words = _words()
    try:
        for text in reading.texts(tuple(words)):
            # Several words may lead to one reader, and one line may say several things.
            readers = dict.fromkeys(reader for word, reader in words.items() if word.decode() in text.text)
            for reader in readers:
                for event, fields, who in reader(text):
                    reading.add(text, event, fields, who)
    except (HitsError, OSError) as error:
        reading.settle(FORMAT, VERSION)
        refused(into, index, error)
        return
    reading.settle(FORMAT, VERSION)


Found = Iterator[tuple[str, dict[str, Any], Who | None]]


def _timeout(text: Text) -> Found:
    if (found := text.match(TIMEOUT)) is None:
        return
    pairs = dict(PAIR.findall(found["work"]))
    fields = {
        "seq": count(pairs.get("SeqNum")),
        "op": printable(pairs.get("OpType", "")),
        "numel_in": count(pairs.get("NumelIn")),
        "numel_out": count(pairs.get("NumelOut")),
        "timeout_ms": count(pairs.get("Timeout(ms)")),
        "ran_ms": count(found["ran"]),
    }
    yield "watchdog_timeout", fields | _group(text), _who(text)


def _counters(text: Text) -> Found:
    if (found := text.match(COUNTERS)) is None:
        return
    counters = [_counter(found[1]), _counter(found[2])]
    fields: dict[str, Any] = {"enqueued": counters[0], "completed": counters[1]} | _group(text)
    # All of it is on one line, or on what was put together from several.
    if told := SIGNAL.search(found.string):
        yield "remote_dump", {"reporter": count(told[1])} | fields, _who(text)
        return
    work = AT_WORK.search(found.string)
    fields = {"work": _counter(work[1]) if work else None} | fields
    is_abort = "Timeout at NCCL work" in text.text
    yield "watchdog_abort" if is_abort else "watchdog_exception", fields, _who(text)


def _stack(text: Text) -> Found:
    found = text.match(STACK)
    if found is None or found["missing"]:
        return
    frames: list[str] = []
    for line in text.following():
        if (frame := FRAME.match(line)) is None or len(frames) >= FRAMES_MAX:
            break
        file = printable(frame["file"])[-NAME_CHARS_MAX:]
        frames.append(f"{printable(frame['func'])} ({file}:{frame['line']})")
    yield "failed_stack", {"frames": tuple(frames)} | _group(text), _who(text)


def _desync(text: Text) -> Found:
    """One rank's report; its parts may be on lines of their own, which have no rank in front."""
    who = _who(text)
    if found := DESYNC_TIMEOUT.search(text.text):
        own = count(found["rank"])
        yield (
            "desync_timeout",
            {"reporter": own, "op": found["op"], "seq": count(found["seq"])},
            replace(who, rank=own) if who.rank is None else who,
        )
    if found := DESYNC_MISSING.search(text.text):
        yield "desync_missing", {"ranks": ranks_in(found[1])}, who
    if found := DESYNC_FINISHED.search(text.text):
        yield "desync_finished", {"ranks": ranks_in(found[1]), "seq": count(found[2])}, who
    if found := DESYNC_JOINED.search(text.text):
        yield "desync_joined", {"ranks": ranks_in(found[1]), "seq": count(found[2])}, who


def _barrier(text: Text) -> Found:
    if found := text.match(BARRIER):
        own = count(found["rank"])
        fields = {"missing": ranks_in(found[2]), "timeout_ms": count(found[3]), "reporter": own}
        yield "monitored_barrier", fields, replace(text.who, rank=own) if text.who.rank is None else text.who


def _mismatch(text: Text) -> Found:
    if found := text.match(MISMATCH):
        one, other = _fingerprint(found["one"], found["own"]), _fingerprint(found["two"], found["other"])
        yield "debug_mismatch", {"one": one, "other": other}, replace(text.who, rank=one["rank"])


def _fingerprint(rank: str, text: str) -> dict[str, Any]:
    told = {name: pattern.search(text) for name, pattern in PRINT_FIELDS.items()}
    values: dict[str, Any] = {name: found[1] if found else None for name, found in told.items()}
    return {"rank": count(rank), **values, "seq": count(values["seq"])}


def _died(text: Text) -> Found:
    if found := text.match(CHILD_FAILED):
        yield from _death(text, found["code"], found["pid"], None, count(found["local"]))


def _root_cause(text: Text) -> Found:
    """The table at the end of a launcher's report: the rank stands a line above its exit code."""
    found = ROOT_CODE.match(text.text)
    if found is None:
        return
    before = text.part[: text.end].rsplit(b"\n", 3)[-3:-1]
    ranks = [ROOT_RANK.match(line.decode("utf-8", "replace")) for line in before]
    told = next((rank for rank in reversed(ranks) if rank), None)
    if told is not None:
        yield from _death(text, found[1], found[2], count(told[1]), count(told[2]))


def _death(text: Text, code: str, pid: str | None, rank: int | None, local: int | None) -> Found:
    exit_code = count(code)
    if exit_code is None or not exit_code:
        return
    # A shell says 128 more than the signal.
    signal = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code < 160 else None
    fields = {"exit_code": exit_code, "signal": signal, "local_rank": local}
    yield "process_died", fields, Who(rank, count(pid), text.who.host)


def _closing(text: Text) -> Found:
    if found := text.match(CLOSING):
        yield "shutdown", {"signal": found["signal"]}, Who(None, count(found["pid"]), text.who.host)


def _sigquit(text: Text) -> Found:
    yield "shutdown", {"signal": "SIGQUIT"}, Who(None, None, text.who.host)


def _exception(text: Text) -> Found:
    """The last line of a traceback, whose head says who it is of; the text of the message is not kept."""
    last = None
    for line in text.following():
        if RAISED.match(line):
            last = RAISED.match(line)
            break
        if (
            line
            and not line[0].isspace()
            and not line.startswith(("File ", "Traceback", "During", "The above"))
        ):
            break
    if last is None:
        return
    is_communication = bool(COMMUNICATION.search(last["rest"]) or COMMUNICATION.search(last["type"]))
    fields = {"type": last["type"].rpartition(".")[2], "is_communication": is_communication}
    yield "exception", fields, text.who


def _store(text: Text) -> Found:
    if text.match(STORE_LOST):
        yield "store_lost", {}, _who(text)


def _counter(text: str) -> int | None:
    number = count(text)
    return number if number is not None and -1 <= number <= COUNTER_MAX else None


def _group(text: Text) -> dict[str, Any]:
    """The group by its brackets: `group` is how its members call it, as far as older versions say."""
    found = BRACKET.search(text.text)
    if found is None:
        return {"group": "", "description": "", "group_rank": None}
    name = found["guid"] or found["old"] or ""
    description = found["description"] or ""
    return {
        "group": printable(name),
        "description": printable(description),
        "group_rank": count(found["rank"]),
    }


def _who(text: Text) -> Who:
    """The writer by the prefix; by the brackets where their group is the whole job.

    Where the two disagree, the row is nobody's: lines of two logs are mixed in it.
    """
    found = BRACKET.search(text.text)
    if found is None:
        return text.who
    description, name = found["description"], found["guid"] or found["old"] or ""
    is_default = description in ("default_pg", "undefined") or (not description and name in DEFAULT_GROUPS)
    own = count(found["rank"])
    if not is_default or own is None:
        return text.who
    if text.who.rank is not None and text.who.rank != own:
        return replace(text.who, rank=None, places={})
    return replace(text.who, rank=own)
