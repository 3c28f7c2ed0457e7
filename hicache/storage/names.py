"""What a page is called in a store, and what must be equal for equal names to mean equal bytes.

```
{page hash}[.{pool}]_{model}[_{tp rank}_{tp size}][_{pp size}_{pp rank}][_cp{cp rank}_{cp size}]
```

KV that is the same on every tensor rank (MLA) has no tensor part and one writer; a recurrent state always
has it. Replicas (dp) share names: they compute the same bytes. These are the names of SGLang 0.5.23's
file backend.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from hicache.core import POOL_NAMES
from hicache.errors import ConfigError
from hicache.topology import Topology

IDENTITY_BYTES = 16
# Sharded over the tensor ranks whatever the KV is.
ALWAYS_SHARDED = ("mamba",)


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bytes of a page are, as far as its name does not say it.

    Attributes:
        model: as served; "/" becomes "-" in names, so that two models may have one name.
        dtype: of the stored values, as the model calls it.
        layout: order of the stored values.
        weights: revision of the weights, or whatever else makes pages of one run useless to another.
        is_replicated: KV is the same on every tensor rank.
    """

    model: str = ""
    dtype: str = ""
    layout: str = ""
    weights: str = ""
    is_replicated: bool = False

    def __post_init__(self) -> None:
        if not self.model.isprintable():
            raise ConfigError(
                f"model name {self.model!r}: it becomes part of file names and must be printable"
            )

    def identity(self, page_size_tokens: int) -> bytes:
        """16 bytes that differ between configurations that can't read each other's pages."""
        text = json.dumps([asdict(self), page_size_tokens], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one rank's pages.

    Attributes:
        suffix: of KV and all that follows from it.
        sharded_suffix: of pools that are sharded whatever the KV is.
        writes_kv: the pages under `suffix` are this rank's to write and to remove.
    """

    suffix: str
    sharded_suffix: str
    writes_kv: bool

    def stem(self, pool: str, page_hash: str) -> str:
        """Name of a page without extension. Never has a separator of paths in it."""
        assert _is_hash(page_hash), f"page hash {page_hash!r}: expected letters and digits"
        assert pool in POOL_NAMES, f"pool {pool!r}: expected one of {', '.join(POOL_NAMES)}"
        label = "" if pool == "kv" else f".{pool}"
        return f"{page_hash}{label}{self.sharded_suffix if pool in ALWAYS_SHARDED else self.suffix}"

    def owns(self, stem: str) -> bool:
        """Whether this is a name that this rank writes."""
        for suffix in (self.suffix, self.sharded_suffix):
            head = stem.removesuffix(suffix)
            page_hash, _, pool = head.partition(".")
            pool = pool or "kv"
            if head == stem or not _is_hash(page_hash) or pool not in POOL_NAMES:
                continue
            if stem == self.stem(pool, page_hash):
                return self.writes_kv or pool in ALWAYS_SHARDED
        return False


def names_of(topology: Topology, rank: int, contents: Contents) -> Names:
    at = topology.coordinates(rank)
    shard = f"_{topology.pp}_{at.pp}" if topology.pp > 1 else ""
    if topology.cp > 1:
        shard += f"_cp{at.cp}_{topology.cp}"
    model = "_" + contents.model.replace("/", "-")
    sharded = f"{model}_{at.tp}_{topology.tp}{shard}"
    if contents.is_replicated:
        return Names(f"{model}{shard}", sharded, writes_kv=at.tp == 0)
    return Names(sharded, sharded, writes_kv=True)


def _is_hash(text: str) -> bool:
    return text.isascii() and text.isalnum()
