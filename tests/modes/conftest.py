"""The command, as the tests of the command line have it."""

from __future__ import annotations

from tests.cli.conftest import built_once, hicache

__all__ = ["built_once", "hicache"]
