"""Logs without names: who the requests, hosts, processes and runs are is nowhere in what comes out.

Owns the rule of what may stay. Numbers stay, and keyed digests, and words of a program in fields that hold
nothing else; every other text is replaced, and one text by one name everywhere, so that whatever was equal
stays equal and a verdict is the same but for the names.

    rid "chat-7f3a"  ->  "r2"        host "node17.example"  ->  "host-a"        path, message  ->  "text-4"

Names are numbered in the order of a digest under a key that is made for one bundle and forgotten: neither who
came first nor a guess says what stands behind one. Blocks get checksums of their own.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from tracer.blocks import is_packed, pieces
from tracer.pack import MEMBER_BYTES, member
from tracer.places import META, SEGMENT
from tracer.record import HEADER

KEY_BYTES = 16
# Fields whose text is a request's id.
REQUEST_FIELDS = frozenset({"rid", "rids", "request", "requests", "request_id", "request_ids"})
# Fields whose text is a word of the program that wrote the log.
WORD_FIELDS = frozenset(
    {
        *(
            "ack",
            "action",
            "axis",
            "axes",
            "call",
            "cause",
            "component",
            "declined",
            "drop_reason",
            "kind",
            "lane",
        ),
        *("lanes", "mode", "op", "outcome", "phase", "place", "policy", "pool", "purpose", "queue"),
        *("reason", "reduce", "role", "state", "verb", "verdict", "chain", "chains"),
    }
)
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.,+-]{0,40}|")
# As this tool names groups, and torch the groups that it makes.
GROUP = re.compile(r"[a-z_]{1,16}[0-9.]{0,16}(?:/[a-z_]{1,16})?|")
# Keyed already, under a key that stands in no log; one or, of several pages, one behind the other.
DIGEST = re.compile(r"(?:[0-9a-f]{16})+")
# Settings whose value is a word; any other text of a config is somebody's own.
SETTING = re.compile(r".*(?:policy|backend|layout|mode|dtype|scheme|reduce|algorithm|core)|server|version")
SETTING_WORD = re.compile(rf"{WORD.pattern}[0-9][0-9A-Za-z.+-]{{0,24}}")
USER_IN_PATH = re.compile(r"/(?:home|Users)/([^/\s\"']+)")
SECRET_CHARS_MIN = 3
META_KEYS = ("wall_clock_ns", "monotonic_ns")
META_BYTES_MAX = 1 << 16
# In the place of what can't be read, and so can't be made nameless.
SPOILT = b'{"seq":"spoilt"}\n{"kind":"block","bytes":17,"crc32":"spoilt"}\n'
UNFINISHED = b'{"seq":'
ROOM = bytes(64)

_RECORD = msgspec.json.Decoder(dict[str, Any])
_ENCODE = msgspec.json.Encoder().encode


class Names:
    """What stands for what; learned from all files first, then asked for each.

    Args:
        key: of the digests that the names are ordered by; one is made up where none is given.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._seen: dict[str, set[str]] = {kind: set() for kind in ("r", "host", "run", "text", "pid")}
        self._secrets: set[str] = set()
        self._names: dict[str, dict[str, str]] | None = None
        self._is_learning = True

    def learn(self, path: Path) -> None:
        """Take in the names of a rank's file; what can't be read has none.

        Raises:
            OSError: it can't be read.
        """
        assert self._is_learning, "names are numbered once all of them are known"
        if META.fullmatch(path.name):
            self._learn_meta(path)
        elif SEGMENT.fullmatch(path.name):
            for piece in pieces(path):
                for line in () if piece.damage else piece.data.split(b"\n"):
                    if (record := _decoded(line)) is not None:
                        self.record(record)

    def learn_host(self, name: str) -> None:
        self._seen["host"].add(name)
        for secret in (name, name.partition(".")[0]):
            if len(secret) >= SECRET_CHARS_MIN:
                self._secrets.add(secret.casefold())

    def number(self) -> None:
        """All of them are known: from here on each has its name."""
        self._is_learning = False
        self._names = {
            kind: {text: _called(kind, index) for index, text in enumerate(sorted(seen, key=self._order))}
            for kind, seen in self._seen.items()
        }

    def mapping(self) -> dict[str, dict[str, str]]:
        """Name -> what it stands for, by what it is; for whoever must be able to look it up."""
        assert self._names is not None, "names are numbered once all of them are known"
        return {
            word: {name: text for text, name in self._names[kind].items()}
            for kind, word in (("r", "requests"), ("host", "hosts"), ("run", "runs"), ("text", "texts"))
        }

    def host(self, name: str) -> str:
        return self._name("host", name)

    def run_id(self, run_id: str) -> str:
        return self._name("run", run_id)

    def file(self, path: Path) -> bytes | None:
        """A rank's file without names; None where it is of no kind that this can be done with.

        Raises:
            OSError: it can't be read.
        """
        if META.fullmatch(path.name):
            return self._meta(path)
        if not SEGMENT.fullmatch(path.name):
            return None
        data = self._log(path)
        if not is_packed(path):
            return data
        parts = [data[at : at + MEMBER_BYTES] for at in range(0, len(data), MEMBER_BYTES)]
        return b"".join(map(member, [*parts, b""]))

    def record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """One line, a header or not, without names."""
        if record.get("kind") == HEADER:
            return self._header(record)
        return {key: self._value(key, value) for key, value in record.items()}

    def _header(self, header: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(header)
        found["run_id"] = self._name("run", str(header.get("run_id", "")))
        if config_digest := header.get("config_digest"):
            # Not a keyed one, so that somebody could try settings until one fits.
            found["config_digest"] = self._digest(str(config_digest), 8)
        config = header.get("config")
        found["config"] = (
            {str(key): self._setting(str(key), value) for key, value in config.items()}
            if isinstance(config, Mapping)
            else {}
        )
        groups = header.get("groups")
        if isinstance(groups, Mapping):
            found["groups"] = {self._value("group", name): ranks for name, ranks in groups.items()}
        return found

    def _setting(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(inner): self._setting(str(inner), each) for inner, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._setting(key, each) for each in value]
        if not isinstance(value, str):
            return value
        for user in USER_IN_PATH.findall(value):
            if len(user) >= SECRET_CHARS_MIN:
                self._secrets.add(user.casefold())
        is_word = SETTING.fullmatch(key) and SETTING_WORD.fullmatch(value) and not self._tells(value)
        return value if is_word else self._name("text", value)

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(key, value)
        if isinstance(value, list):
            return [self._value(key, each) for each in value]
        if isinstance(value, dict):
            # Its keys are lanes, axes or fields of records.
            return {self._text("lane", inner): self._value(inner, each) for inner, each in value.items()}
        return value

    def _text(self, key: str, text: str) -> str:
        if key in REQUEST_FIELDS:
            return self._name("r", text)
        pattern = WORD if key in WORD_FIELDS else GROUP if key == "group" else None
        if pattern is not None and pattern.fullmatch(text) and not self._tells(text):
            return text
        if text in self._seen["r"]:
            return self._name("r", text)
        return text if DIGEST.fullmatch(text) else self._name("text", text)

    def _tells(self, text: str) -> bool:
        """Whether a word has the name of a host or a user in it."""
        folded = text.casefold()
        return any(secret in folded for secret in self._secrets)

    def _name(self, kind: str, text: str) -> str:
        if not text:
            return text
        if self._names is None:
            self._seen[kind].add(text)
            return text
        # One that nobody has learned stands in a line that has come since.
        return self._names[kind].get(text) or f"{kind}-{self._digest(text, 4)}"

    def _order(self, text: str) -> str:
        return self._digest(text, 16)

    def _digest(self, text: str, size: int) -> str:
        return blake2b(text.encode("utf-8", "replace"), digest_size=size, key=self._key).hexdigest()

    def _learn_meta(self, path: Path) -> None:
        facts = _facts(path)
        if isinstance(host := facts.get("host"), str):
            self.learn_host(host)
        if type(pid := facts.get("pid")) is int:
            self._seen["pid"].add(str(pid))

    def _meta(self, path: Path) -> bytes:
        facts = _facts(path)
        found: dict[str, Any] = {}
        if isinstance(host := facts.get("host"), str):
            found["host"] = self._name("host", host)
        if type(pid := facts.get("pid")) is int:
            found["pid"] = int(self._name("pid", str(pid)).removeprefix("pid-"), 16)
        found |= {key: facts[key] for key in META_KEYS if type(facts.get(key)) is int}
        return json.dumps(found).encode() + b"\n"

    def _log(self, path: Path) -> bytes:
        """Its lines up to the first that can't be read, in the same blocks."""
        out: list[bytes] = []
        for piece in pieces(path):
            if piece.damage:
                out.append(SPOILT)
                continue
            lines, is_whole = self._lines(piece.data)
            out.append(lines)
            if not is_whole:
                break
            if piece.is_checked:
                checksum = zlib.crc32(lines)
                out.append(b'{"kind":"block","bytes":%d,"crc32":"%08x"}\n' % (len(lines), checksum))
        return b"".join(out)

    def _lines(self, data: bytes) -> tuple[bytes, bool]:
        """The lines of a piece, and whether all of them could be read."""
        *lines, rest = data.split(b"\n")
        out: list[bytes] = []
        for line in lines:
            record = _decoded(line)
            if record is None:
                return b"".join([*out, UNFINISHED, b"\n"]), False
            out.append(_ENCODE(self.record(record)) + b"\n")
        if not rest:
            return b"".join(out), True
        # The unwritten rest of the file, or a line that was not finished.
        begin = b"" if rest.startswith(b"\0") else UNFINISHED
        return b"".join([*out, begin, ROOM if b"\0" in rest else b""]), False


def _called(kind: str, index: int) -> str:
    if kind == "r":
        return f"r{index + 1}"
    if kind == "pid":
        return f"pid-{index + 1:x}"
    if kind != "host":
        return f"{kind}-{index + 1}"
    letters = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return f"host-{letters}"


def _decoded(line: bytes) -> dict[str, Any] | None:
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return _RECORD.decode(line)
    return None


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(META_BYTES_MAX)
    with suppress(ValueError, RecursionError):
        found = json.loads(data)
        return found if isinstance(found, dict) else {}
    return {}


def learned(files: Iterable[Path], hosts: Sequence[str], *, key: bytes | None = None) -> Names:
    """Names for all that stands in these files; two passes, since the first file may need the last one's."""
    names = Names(key)
    for host in hosts:
        names.learn_host(host)
    # Side files first: whose hosts they are decides which words tell something.
    for path in sorted(files, key=lambda path: (META.fullmatch(path.name) is None, str(path))):
        with suppress(OSError):
            names.learn(path)
    names.number()
    return names
