"""Whole texts compared with files in tests/golden. A change of one is read as prose in the diff.

`HICACHE_WRITE_GOLDEN=1 make test` writes them anew; the tests then fail once, so that it can't be left on.
"""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("HICACHE_WRITE_GOLDEN") == "1" and (not path.exists() or path.read_text() != text):
        path.write_text(text, encoding="utf-8")
        raise AssertionError(f"{path.name} was written anew; read the diff, then run without the variable")
    assert path.read_text(encoding="utf-8") == text
