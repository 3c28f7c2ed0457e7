"""Every importer of evidence; see `dossier` for what they make of it, `gather` for who is asked what."""

from __future__ import annotations

from typing import cast

from tracer.importers import (
    flight_recorder,
    gloo_lines,
    log_ends,
    process_state,
    ras,
    scheduler_status,
    sglang_lines,
    stacks_faulthandler,
    stacks_pyspy,
    stacks_pyspy_json,
    stacks_pystack,
    torch_lines,
)
from tracer.importers.gather import Importer

# A file is of one of these formats from end to end.
WHOLE = cast(tuple[Importer, ...], (flight_recorder, stacks_pyspy_json, process_state, ras))
# Of a text each takes the lines that it knows.
LINES = cast(
    tuple[Importer, ...],
    (
        sglang_lines,
        scheduler_status,
        torch_lines,
        gloo_lines,
        stacks_pyspy,
        stacks_pystack,
        stacks_faulthandler,
        log_ends,
    ),
)
