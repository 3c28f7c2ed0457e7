"""The command, as the tests of the command line have it."""

from __future__ import annotations

from tests.cli.conftest import hicache

__all__ = ["hicache"]
