"""What the watchers of one replica write to each other, and how large that may be.

Owns the messages. A post is written over by the next one, so that it says all that the others must know by
now; a question and its answers are written over too. Nothing else is kept in the store.

    post/3     rank 3: heads and digests of its chains, where its lanes are    each period, by its rank
    finder     who compares, and the open question                             each period, by the finder
    answer/3   digests, links or records that were asked for                   when asked, by its rank
    verdict    the last things found, to be told by all                        by the finder
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

VERSION = 1
# No post is larger; a usual one has 2 KiB. What has no room is left out, the newest last.
POST_BYTES_MAX = 64 << 10
# Links and records that are asked for: more of them are not sent.
ANSWER_BYTES_MAX = 1 << 20
LANES_MAX = 32
CHAINS_MAX = 16
GROUPS_MAX = 8
CALLS_MAX = 4
PUBLISHED_MAX = 8
TEXT_CHARS_MAX = 64
# Fields of a record that say where a lane is: numbers, names and request ids.
PLACE_FIELDS = (
    *("kind", "phase", "step", "seq", "rid", "node", "op", "group", "group_seq"),
    *("purpose", "site", "peer", "state", "result"),
)

FINDER, VERDICT = "finder", "verdict"


class ChainPost(msgspec.Struct, frozen=True, array_like=True):
    """One chain of a lane.

    Attributes:
        head: links so far, and the digest over them.
        marks: count and digest of some of those before; of the newest many, of older ones fewer.
        lost: links that were gone before they were digested; then nothing here is worth anything.
        tail: the last links as JSON, from number `tail_first` on, when the rank has ended.
    """

    axes: tuple[str, ...]
    head: int
    digest: str
    marks: list[tuple[int, str]]
    lost: int = 0
    tail_first: int = 0
    tail: bytes = b""


class Inside(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a lane is that has been still for a while.

    Attributes:
        last: its last record, as far as that says where it is.
        calls: calls that have not returned, outermost first.
        meeting: the collective entered and not left; `members` are the ranks of its group.
        entered, left: group -> newest call of it that was entered, and left; of messages, see `meeting_key`.
        state: what its last `lane_state` said, if nothing came behind it.
    """

    last: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    meeting: dict[str, Any] | None = None
    members: list[int] = []
    entered: dict[str, int] = {}
    left: dict[str, int] = {}
    state: str = ""


class LanePost(msgspec.Struct, frozen=True):
    """One lane. `is_thinned`: it was seen to leave steps out; `dropped`: kinds it has given up."""

    name: str
    step: int
    seq: int
    chains: list[ChainPost] = []
    inside: Inside | None = None
    dropped: dict[str, int] = {}
    is_thinned: bool = False


class Post(msgspec.Struct, frozen=True):
    """One rank.

    Attributes:
        session: of its process; another one is another process.
        contract: of its run, its axes and its digests; only ranks with one contract are compared.
        host: of the machine and its namespace of processes, so that a neighbour can look for `pid`.
        told: number of the last verdict that it has told.
        ended: how its lanes were closed, or "".
        lag_s: how late its own watcher is.
    """

    version: int
    rank: int
    session: str
    beat: int
    contract: str
    coordinates: dict[str, int]
    host: str
    pid: int
    lanes: list[LanePost]
    told: int = 0
    ended: str = ""
    lag_s: float = 0.0


class Question(msgspec.Struct, frozen=True):
    """What is asked of one chain: digests at `counts`; links from one number up to another, their records."""

    lane: str
    axes: tuple[str, ...]
    counts: list[int] = []
    links: tuple[int, int] | None = None
    has_records: bool = False


class FinderPost(msgspec.Struct, frozen=True):
    """The one that compares.

    Attributes:
        epoch: how often another one has taken over; the greater one holds.
        ask: number of the open question, 0 for none yet. `is_urgent`: answer at once.
        verdict: number of the last verdict published.
        is_closed: all members have ended, and nobody need wait for anything.
        has_left: it has ended before the others.
    """

    version: int
    epoch: int
    rank: int
    session: str
    beat: int
    ask: int = 0
    questions: list[Question] = []
    is_urgent: bool = False
    verdict: int = 0
    is_closed: bool = False
    has_left: bool = False


class Told(msgspec.Struct, frozen=True):
    """The answer to one question.

    Attributes:
        first: number of the first of `links`, a JSON array.
        lines: records of the log around them; `has_lines` is false where there is no log.
        records_of: axes -> records that agree along them before the first of `lines`; empty if not counted.
        file: the file that holds most of `lines`.
        kinds: what the rank declares, as JSON.
    """

    digests: list[tuple[int, str]] = []
    first: int = 0
    links: bytes = b"[]"
    has_lines: bool = False
    lines: bytes = b""
    records_of: dict[str, int] = {}
    file: str = ""
    step: int = 0
    kinds: bytes = b"{}"


class Answer(msgspec.Struct, frozen=True):
    version: int
    rank: int
    session: str
    ask: int
    told: list[Told]


class Published(msgspec.Struct, frozen=True):
    """What all ranks tell, once.

    Attributes:
        verdict: JSON of the verdict; empty where this is only a line.
        is_final: nothing more is looked for.
        may_abort: a policy may end the process for it.
        when_ns: the finder's clock, for names of files.
    """

    number: int
    rank: int
    text: str
    verdict: bytes = b""
    is_final: bool = False
    may_abort: bool = False
    when_ns: int = 0


class Bulletin(msgspec.Struct, frozen=True):
    """The last of what was published, for ranks that look seldom."""

    version: int
    items: list[Published]


Message = Post | FinderPost | Answer | Bulletin
M = TypeVar("M", Post, FinderPost, Answer, Bulletin)
_encode = msgspec.msgpack.Encoder().encode


def encoded(message: Message) -> bytes:
    return _encode(message)


def decoded(data: bytes, kind: type[M]) -> M | None:
    """The message, or None where the key holds something else."""
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return message if message.version == VERSION else None


def post_bytes(post: Post) -> bytes:
    """The post, without what would make it too large."""
    lanes = [
        msgspec.structs.replace(lane, chains=lane.chains[:CHAINS_MAX]) for lane in post.lanes[:LANES_MAX]
    ]
    data = _encode(msgspec.structs.replace(post, lanes=lanes))
    part = 2
    while len(data) > POST_BYTES_MAX and part < 1 << 10:
        data = _encode(msgspec.structs.replace(post, lanes=[_thinned(lane, part) for lane in lanes]))
        part *= 2
    if len(data) > POST_BYTES_MAX:
        data = _encode(msgspec.structs.replace(post, lanes=[]))
    return data


def _thinned(lane: LanePost, part: int) -> LanePost:
    """The newest of its marks, and the shortest of its tails."""
    chains = [
        msgspec.structs.replace(chain, marks=chain.marks[-(len(chain.marks) // part) :], tail=b"")
        for chain in lane.chains
    ]
    return msgspec.structs.replace(lane, chains=chains, inside=None if part > 2 else lane.inside)


def place_of(record: dict[str, Any]) -> dict[str, Any]:
    """Of a record what says where a lane is."""
    found = {name: record[name] for name in PLACE_FIELDS if name in record}
    return {
        name: value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
        for name, value in found.items()
        if value is None or isinstance(value, int | str)
    }


def meeting_key(record: Mapping[str, Any], *, answer_to: int | None = None) -> str:
    """The group whose calls a meeting counts; of a message also its direction and its peer.

    Args:
        answer_to: the key of what its peer does to meet a message of this rank.
    """
    group, peer = str(record.get("group")), record.get("peer")
    if type(peer) is not int:
        return group
    is_send = str(record.get("op", "")).removeprefix("i").startswith("send")
    if answer_to is not None:
        is_send, peer = not is_send, answer_to
    return f"{group} {'to' if is_send else 'from'} {peer}"
