"""What must never leave the process: token ids, texts, keys, passwords. Canaries go in and are looked for."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import struct
from array import array
from pathlib import Path

import pytest

from hicache.config import Config, StorageConfig
from hicache.core import Request
from hicache.job import Plan
from hicache.schedule import Schedule
from hicache.sim.world import simulate
from hicache.topology import Topology
from tests.cli.conftest import Hicache
from tests.support.runs import Listed

PAGE_TOKENS = 16
TOKEN = 3_987_654_321
TEXT = "canary-text-7c1e"
KEY = "sk-canary-key-51ab"
PASSWORD = "canary-password-90fd"
SHORT_BYTES = 8


def prompt(request: int) -> bytes:
    """Three pages; the canary is alone in the middle of each, and one page is nothing else."""
    return array("I", [TOKEN] * PAGE_TOKENS + [request, TOKEN, 7] * PAGE_TOKENS).tobytes()[
        : 3 * PAGE_TOKENS * 4
    ]


def canaries() -> dict[str, bytes]:
    """What would give the canaries away, by what it is."""
    packed = struct.pack("<I", TOKEN)
    page = packed * PAGE_TOKENS
    digest = hashlib.sha256(page)
    return {
        "token, decimal": str(TOKEN).encode(),
        "token, hexadecimal": f"{TOKEN:x}".encode(),
        "token, packed": packed,
        "token, packed, hexadecimal": packed.hex().encode(),
        "page, base64": base64.b64encode(page)[:40],
        "page hash": digest.hexdigest().encode(),
        "page hash, half of it": digest.hexdigest()[:16].encode(),
        "page hash, raw": digest.digest()[:16],
        "page hash, number": str(int.from_bytes(digest.digest()[:8], "big", signed=True)).encode(),
        "text": TEXT.encode(),
        "API key": KEY.encode(),
        "password": PASSWORD.encode(),
    }


def plan(folder: Path) -> Plan:
    requests = [
        Request(
            f"r{number}",
            prompt(number % 3),
            array("I", [TOKEN] * 20).tobytes(),
            20,
            extra_key=TEXT if number % 2 else "",
            cache_salt=TEXT if number % 3 else "",
        )
        for number in range(12)
    ]
    config = Config(
        topology=Topology(tp=2),
        page_size_tokens=PAGE_TOKENS,
        device_pages=12,
        host_pages=24,
        concurrency=2,
        storage=StorageConfig(backend="file", directory=str(folder), prefetch_threshold_tokens=16),
    )
    return Plan(config, "canaries", lambda replica: Listed(list(requests)), Schedule(seed=1))


def demand_silence(data: bytes, where: str) -> None:
    for what, canary in canaries().items():
        # Four bytes, or their digits, may stand in packed data or in a digest by chance. What is written of
        # one request is written of all.
        allowed = 1 if len(canary) <= SHORT_BYTES else 0
        assert data.count(canary) <= allowed, f"{what} in {where}"


def plain(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


@pytest.fixture(scope="module")
def secretive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in full and the same in a ring."""
    folder = tmp_path_factory.mktemp("secretive")
    for trace in ("full", "ring"):
        result = simulate(plan(folder / f"store {trace}"), out=folder / trace, trace=trace)  # type: ignore[arg-type]
        assert (result.outcome, result.served) == ("completed", 12)
    return folder


def test_the_canaries_are_in_what_went_in(secretive: Path) -> None:
    """Otherwise finding none anywhere would mean nothing."""
    assert canaries()["token, packed"] in prompt(1)
    stored = b"".join(path.name.encode() for path in (secretive / "store full").rglob("*"))
    assert canaries()["page hash"] in stored


@pytest.mark.parametrize("trace", ["full", "ring"])
def test_no_file_of_a_run_has_a_canary(trace: str, secretive: Path) -> None:
    files = [path for path in (secretive / trace).rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        demand_silence(plain(path), path.name)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "--json"],
        ["check"],
        ["hits", "--json"],
        ["hits", "--by", "prefix", "--json"],
        ["hits", "--why", "r5", "--json"],
        ["hits", "--why", "r5"],
        ["query", "FROM records", "--json"],
        ["query", "FROM decisions", "--format", "csv"],
        ["query", "FROM requests"],
    ],
    ids=" ".join,
)
def test_no_answer_has_a_canary(words: list[str], secretive: Path, hicache: Hicache) -> None:
    command, *options = words
    said = hicache(command, secretive / "full", *options)
    assert (said.code, said.err) == (0, "")
    demand_silence(said.out.encode(), " ".join(words))


@pytest.mark.parametrize("format", ["perfetto", "otlp", "prometheus", "fr-json", "parquet"])
def test_no_export_has_a_canary(format: str, secretive: Path, tmp_path: Path, hicache: Hicache) -> None:
    out = tmp_path / "export"
    said = hicache("export", secretive / "full", "--to", format, "--out", out)
    assert said.code == 0, said.err
    files = [path for path in ([out] if out.is_file() else out.rglob("*")) if path.is_file()]
    assert files
    for path in files:
        demand_silence(plain(path), path.name)
    if format == "parquet":
        # Columns are compressed there.
        demand_silence(hicache("query", out, "FROM records", "--json").out.encode(), "records of the export")


def test_no_kept_store_has_a_canary(secretive: Path, tmp_path: Path, hicache: Hicache) -> None:
    kept = tmp_path / "run.duckdb"
    assert hicache("query", secretive / "full", "SELECT 1", "--db", kept).code == 0
    demand_silence(kept.read_bytes(), kept.name)
    demand_silence(hicache("query", kept, "FROM records", "--json").out.encode(), "records of the store")


def test_what_is_refused_is_not_repeated(
    tmp_path: Path, hicache: Hicache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password in an option that is not there yet, a key in the environment: neither is said again."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    extra = json.dumps({"password": PASSWORD, "api_key": KEY})
    words = ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", extra]
    said = hicache("run", *words, "--out", tmp_path / "run")
    assert said.code == 2
    demand_silence((said.out + said.err).encode(), "the refusal")
    assert not (tmp_path / "run").exists()
