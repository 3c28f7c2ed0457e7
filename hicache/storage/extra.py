"""`--hicache-storage-backend-extra-config` and the environment, as fields of the storage configuration."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from hicache.errors import ConfigError
from hicache.storage.limits import parse_size

OPTION = "--hicache-storage-backend-extra-config"
ENVIRONMENT = "SGLANG_HICACHE_FILE_BACKEND_"


def extra_config(text: str) -> dict[str, Any]:
    """Fields of `StorageConfig` and `Limits` that an extra config sets; "" sets none.

    Args:
        text: a JSON object, or `@` and the path of a `.json` or `.toml` file that holds one.
    Raises:
        ConfigError: not readable, an unknown key, a value of the wrong type.
    """
    if not text.strip():
        return {}
    found = _from_file(text[1:]) if text.startswith("@") else _parse(json_object, text, "the text")
    for key in found:
        if key in REFUSED:
            raise ConfigError(f"{OPTION}: {key} is not there yet: {REFUSED[key]}")
        if key not in KEYS:
            raise ConfigError(f"{OPTION}: unknown key {key!r}; known are {', '.join(KEYS)}")
    return {KEYS[key][0]: KEYS[key][1](key, value) for key, value in found.items()}


def environment_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """The same fields, as far as `SGLANG_HICACHE_FILE_BACKEND_*` sets them; an empty variable sets nothing.

    The folder of the environment wins over that of an extra config; of limits the extra config's win.
    """
    found = {}
    for suffix, (field, convert) in VARIABLES.items():
        if value := environ.get(ENVIRONMENT + suffix, ""):
            found[field] = convert(ENVIRONMENT + suffix, value)
    return found


def json_object(text: str) -> dict[str, Any]:
    """Strict JSON: no NaN, no key twice.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    if not isinstance(found, dict):
        raise ValueError(f'expected an object like {{"prefetch_threshold": 256}}, got {text.strip()[:40]}')
    return found


def _from_file(path: str) -> dict[str, Any]:
    extension = os.path.splitext(path)[1].lower()
    if extension not in (".json", ".toml"):
        what = (
            "YAML is not read"
            if extension in (".yaml", ".yml")
            else f"no format has the ending {extension!r}"
        )
        raise ConfigError(f"{OPTION} @{path}: {what}; write it as .json or .toml")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"{OPTION} @{path}: {reason}") from error
    return _parse(json_object if extension == ".json" else tomllib.loads, text, path)


def _parse(parse: Callable[[str], dict[str, Any]], text: str, where: str) -> dict[str, Any]:
    try:
        return parse(text)
    except RecursionError as error:
        raise ConfigError(f"{OPTION}: {where}: nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{OPTION}: {where}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _tokens(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{key} {value!r}: expected a whole number of tokens")
    return value


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise ConfigError(f"{key} {value!r}: expected a number")
    return float(value)


def _number_in_text(key: str, value: str) -> float:
    try:
        return _number(key, float(value))
    except ValueError as error:
        raise ConfigError(f"{key} {value!r}: expected a number") from error


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} {value!r}: expected true or false")
    return value


def _path(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{key} {value!r}: expected the path of a folder")
    return value


def _size(key: str, value: Any) -> int:
    return parse_size(value, name=key)


Convert = Callable[[str, Any], Any]

# key -> (field, how its value is read)
KEYS: dict[str, tuple[str, Convert]] = {
    "prefetch_threshold": ("prefetch_threshold_tokens", _tokens),
    "prefetch_timeout_base": ("prefetch_timeout_base_s", _number),
    "prefetch_timeout_per_ki_token": ("prefetch_timeout_per_ki_token_s", _number),
    "hicache_storage_pass_prefix_keys": ("pass_prefix_keys", _switch),
    "file_storage_path": ("directory", _path),
    "fsync": ("fsync", _switch),
    "max_size": ("max_size_bytes", _size),
    "min_free_space": ("min_free_bytes", _size),
    "eviction_ratio": ("eviction_ratio", _number),
}
VARIABLES: dict[str, tuple[str, Convert]] = {
    "STORAGE_DIR": ("directory", _path),
    "MAX_SIZE": ("max_size_bytes", _size),
    "MIN_FREE_SPACE": ("min_free_bytes", _size),
    "EVICTION_RATIO": ("eviction_ratio", _number_in_text),
}
REFUSED = {
    "tp_lcm_size": "pages are stored whole, heads are not split for other tensor sizes",
    "enable_metadata_cache": "it would promise pages that another process has removed",
    "metadata_ttl": "there is no metadata cache",
}
