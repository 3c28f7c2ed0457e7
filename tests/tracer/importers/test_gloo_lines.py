from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.foreign_lines import GLOO_CLOSED, GLOO_RESET, GLOO_SIZES, GLOO_TIMEOUT, read
from tracer.importers import gloo_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GLOO_TIMEOUT, [("gloo_timeout", {"timeout_ms": 3000, "direction": "recv"})]),
        (GLOO_CLOSED, [("gloo_closed", {"peer": "127.0.0.1:41703"})]),
        (GLOO_RESET, [("gloo_reset", {"peer": "127.0.0.1:14988"})]),
        (
            GLOO_SIZES,
            [
                ("gloo_abort", {"type": "EnforceNotMet"}),
                ("gloo_size_mismatch", {"sent_bytes": 16, "own_bytes": 8}),
            ],
        ),
    ],
)
def test_what_gloo_says(tmp_path: Path, text: str, expected: list[tuple[str, dict[str, object]]]) -> None:
    found = read(gloo_lines, tmp_path, f"before\n{text}after\n")
    assert expected == [(line.event, line.fields) for line in found.lines]
    assert found.files[0].unparsed == 2


def test_a_clients_lost_connection_is_none_of_gloos(tmp_path: Path) -> None:
    text = (
        "ConnectionResetError: [Errno 104] Connection reset by peer\nConnection closed by peer 1.2.3.4:80\n"
    )
    found = read(gloo_lines, tmp_path, text)
    assert (found.lines, found.files[0].format) == ([], None)
