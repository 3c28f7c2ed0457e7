"""Rule `leak_line`: a pool's counts do not add up, says SGLang's own check.

Equation, for the pool of a rank:

    available + evictable + protected = total

    pool memory leak detected! available=640, evictable=20480, protected=0, total=20480      640 too many

More than the total: something was given back twice, or is counted both as free and as cached. Less: something
was never given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from consensus_checker.claim import Claim
from consensus_checker.finding import Finding
from consensus_checker.said import entry, lines_of
from consensus_checker.words import ranks_text
from tracer.importers.dossier import Dossier

RULE = "leak_line"
TOTALS = ("total", "max_total_num_tokens")
PARTS = ("available", "evictable", "protected", "session_held", "uncached")


def find(dossier: Dossier) -> list[Claim]:
    lines = lines_of(dossier, ("leak_check",))
    if not lines:
        return []
    # All ranks of a replica may say so; who said it first by a clock, nobody knows.
    first = {line.who.rank: line for line in reversed(lines)}
    ranks = tuple(sorted(rank for rank in first if rank is not None))
    off = _off(lines[0].fields)
    told = f": {abs(off):,} tokens too {'many' if off > 0 else 'few'}" if off else ""
    where = f" on {ranks_text(ranks)}" if ranks else ""
    finding = Finding(
        "invariant",
        18,
        RULE,
        f"a pool's counts do not add up{where}{told}",
        "high",
        basis=(f"{len(lines)} lines of SGLang's own check",),
        resembles=("HC12", "HC13"),
        culprit=ranks,
        evidence=(
            *(entry(dossier, first[rank], f"culprit {rank}") for rank in ranks),
            *(() if ranks else (entry(dossier, lines[0], "a pool that does not add up"),)),
        ),
    )
    return [Claim(finding)]


def _off(counts: Mapping[str, Any]) -> int:
    """Tokens by which the parts are more than the whole; 0 where the line does not say."""
    total = next((counts[name] for name in TOTALS if name in counts), None)
    parts = [counts.get(name, counts.get(f"{name}_size")) for name in PARTS]
    known = [part for part in parts if part is not None]
    return sum(known) - total if total is not None and known else 0
