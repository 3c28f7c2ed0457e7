"""From a configuration to the backend of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hicache.config import Config
from hicache.storage.backend import Backend
from hicache.storage.extra import environment_config
from hicache.storage.file import FileBackend
from hicache.storage.limits import Limits
from hicache.storage.memory import MemoryBackend
from hicache.storage.names import Contents, names_of


def make_backend(
    config: Config,
    rank: int,
    *,
    shared: dict[str, bytes],
    contents: Contents | None = None,
    limits: Limits | None = None,
    environ: Mapping[str, str] | None = None,
) -> Backend:
    """The backend that `config.storage` names. Not open yet; nothing is touched before `open`.

    Args:
        shared: where the memory backends of all ranks of a process keep their pages.
        contents: what pages hold. Runs whose pages must not be read by each other need different ones.
        limits: None for what the environment says.
        environ: None for the process's own. As in SGLang its folder wins over the configured one.
    """
    storage = config.storage
    contents = contents or Contents()
    names = names_of(config.topology, rank, contents)
    if storage.backend == "memory":
        return MemoryBackend(shared, names)
    assert storage.backend == "file", f"no backend to make for {storage.backend!r}"
    outside = environment_config(os.environ if environ is None else environ)
    return FileBackend(
        outside.pop("directory", storage.directory),
        names,
        contents.identity(config.page_size_tokens),
        limits=limits or Limits(**outside),
        fsync=storage.fsync,
    )
