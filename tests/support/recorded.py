"""Flight recorder dumps as text, so that a rule's smallest evidence can be read.

    0  tp: 41 42 43~            rank 0 has called 41 to 43 of group tp, and 43 has not ended
    1  tp: 41 42 43!            the watchdog has given 43 up
    2  tp: 41 42:broadcast      another op than the usual all_reduce
    2  tp: 41 42:all_reduce[2]  another size
    3  tp=42/42                 its status alone: called, ended
    4  -                        a dump without entries and states
    0  tp: 43~ | dp: 7          two groups; a rank that comes again was looked at again

Members of a group are all ranks with a line that has it. Dumps go through the importer as what torch writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tracer.importers.dossier import At, Dossier
from tracer.importers.recorded_dump import compiled

CALL = re.compile(r"(\d+)(?::([a-z_]+)(?:\[([\dx]+)\])?)?([~!])?")
STATUS = re.compile(r"(\w+)=(-?\d+)/(-?\d+)")
Groups = dict[str, tuple[list[str], tuple[int, int] | None]]


def dossier(
    text: str,
    *,
    backend: str = "nccl",
    members: Mapping[str, Sequence[int]] | None = None,
    forms: Sequence[str] = (),
) -> Dossier:
    """What the importer makes of the dumps; file N is the N-th line, `dump_RANK`.

    Args:
        members: of groups, where they are not those with a line; an empty list where no dump has them.
        forms: of each line, pickles where there are no more.
    """
    lines = [line.split(maxsplit=1) for line in text.strip().splitlines()]
    ranks = [(int(rank), _groups(rest)) for rank, rest in lines]
    names = list(dict.fromkeys(name for _, groups in ranks for name in groups))
    known = {name: sorted({rank for rank, groups in ranks if name in groups}) for name in names}
    known |= {name: list(own) for name, own in (members or {}).items()}
    into = Dossier()
    for at, (rank, groups) in enumerate(ranks):
        index = into.begin(f"dump_{rank}")
        config = {name: own for name, own in known.items() if rank in own or not own}
        form = forms[at] if at < len(forms) else "pickle"
        document = _document(groups, config, backend)
        into.dumps.append(compiled(document, rank, form, into.files[index], At(index, 0)))
    return into


def _groups(text: str) -> Groups:
    groups: Groups = {}
    for part in text.split("|"):
        if found := STATUS.fullmatch(part.strip()):
            groups[found[1]] = ([], (int(found[2]), int(found[3])))
        elif part.strip() != "-":
            name, _, calls = part.partition(":")
            groups[name.strip()] = (calls.split(), None)
    return groups


def _document(groups: Groups, config: Mapping[str, Sequence[int]], backend: str) -> dict[str, Any]:
    ids = {name: at for at, name in enumerate([*groups, *(name for name in config if name not in groups)])}
    entries = [
        _entry(name, ids[name], token, backend) for name, (calls, _) in groups.items() for token in calls
    ]
    status = {}
    for name, (calls, told) in groups.items():
        seqs = [int(found[1]) for token in calls if (found := CALL.fullmatch(token))]
        ended = [int(found[1]) for token in calls if (found := CALL.fullmatch(token)) and not found[4]]
        before = min(seqs, default=0) - 1
        enqueued, completed = told or (max(seqs, default=-1), max(ended, default=before))
        status[str(ids[name])] = {
            "last_enqueued_collective": enqueued,
            "last_started_collective": -1,
            "last_completed_collective": completed,
        }
    return {
        "version": "2.9",
        "nccl_version": "2.27.3" if backend == "nccl" else "",
        "pg_config": {name: {"name": name, "desc": "", "ranks": str(list(config[name]))} for name in config},
        "pg_status": status,
        "entries": entries,
    }


def _entry(name: str, pg_id: int, token: str, backend: str) -> dict[str, Any]:
    found = CALL.fullmatch(token)
    assert found is not None, token
    seq, op, size, mark = int(found[1]), found[2] or "all_reduce", found[3] or "4", found[4]
    sizes = [[int(one) for one in size.split("x")]]
    is_done = mark is None
    return {
        "record_id": seq,
        "pg_id": pg_id,
        "process_group": (name, ""),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": 1_796_017_079_000_000_000 + seq,
        "input_sizes": sizes,
        "input_dtypes": ["Float"],
        "output_sizes": sizes,
        "output_dtypes": ["Float"],
        "state": "completed" if is_done and backend != "gloo" else "scheduled",
        "retired": is_done or mark == "!",
        "is_p2p": False,
        "timeout_ms": 600_000,
        "thread_name": "python",
        "thread_id": "7",
    }
