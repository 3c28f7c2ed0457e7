from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config import StorageConfig
from hicache.errors import ConfigError
from hicache.storage.extra import environment_config, extra_config

ALL = """{
    "prefetch_threshold": 512, "prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.5,
    "hicache_storage_pass_prefix_keys": true, "file_storage_path": "/data/kv", "fsync": true,
    "max_size": "200G", "min_free_space": "1.5Gi", "eviction_ratio": 0.8
}"""


def test_every_key_becomes_a_field_in_units() -> None:
    assert extra_config(ALL) == {
        "prefetch_threshold_tokens": 512,
        "prefetch_timeout_base_s": 2.0,
        "prefetch_timeout_per_ki_token_s": 0.5,
        "pass_prefix_keys": True,
        "directory": "/data/kv",
        "fsync": True,
        "max_size_bytes": 200_000_000_000,
        "min_free_bytes": 1_610_612_736,
        "eviction_ratio": 0.8,
    }


def test_what_is_not_said_is_not_set() -> None:
    assert extra_config("") == extra_config("  ") == extra_config("{}") == {}
    assert extra_config('{"prefetch_threshold": 0}') == {"prefetch_threshold_tokens": 0}


def test_the_fields_are_those_of_the_storage_configuration() -> None:
    fields = extra_config('{"prefetch_threshold": 64, "file_storage_path": "x", "fsync": false}')
    assert StorageConfig(backend="file", **fields).prefetch_threshold_tokens == 64


def test_a_file_is_read_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"max_size": 4096}')
    (tmp_path / "a.TOML").write_text('max_size = "4Ki"\nfsync = true\n')
    assert extra_config(f"@{tmp_path}/a.json") == {"max_size_bytes": 4096}
    assert extra_config(f"@{tmp_path}/a.TOML") == {"max_size_bytes": 4096, "fsync": True}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "fsync: true", "YAML is not read; write it as .json or .toml"),
        ("a.yml", "", "YAML is not read"),
        ("a.ini", "", "no format has the ending '.ini'"),
        ("a", "", "no format has the ending ''"),
        ("a.toml", "fsync =", "a.toml: "),
        ("a.json", "{'fsync': true}", "a.json: "),
        ("a.json", '{"fsync": true', "a.json: "),
        ("a.json", "\ufeff{}", "a.json: "),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as refused:
        extra_config(f"@{tmp_path}/{name}")
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file or directory"):
        extra_config(f"@{tmp_path}/none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json: Is a directory"):
        extra_config(f"@{tmp_path}/folder.json")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"file_storage_path": "\xff"}')
    with pytest.raises(ConfigError, match="utf-8"):
        extra_config(f"@{tmp_path}/a.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected an object like"),
        ("null", "expected an object like"),
        ("fsync", "the text: Expecting value"),
        ("[" * 100_000, "the text: "),
        ('{"fsync": true, "fsync": false}', "a key is there twice"),
        ('{"prefetch_timeout_base": NaN}', "NaN is not a number"),
        ('{"prefetch_treshold": 1}', "unknown key 'prefetch_treshold'; known are prefetch_threshold,"),
        ('{"tp_lcm_size": 4}', "tp_lcm_size is not there yet"),
        ('{"enable_metadata_cache": true}', "enable_metadata_cache is not there yet"),
        ('{"prefetch_threshold": 1.5}', "prefetch_threshold 1.5: expected a whole number of tokens"),
        ('{"prefetch_threshold": true}', "prefetch_threshold True: expected a whole number of tokens"),
        ('{"prefetch_threshold": "256"}', "prefetch_threshold '256': expected a whole number of tokens"),
        ('{"prefetch_timeout_base": "1"}', "prefetch_timeout_base '1': expected a number"),
        ('{"prefetch_timeout_base": true}', "prefetch_timeout_base True: expected a number"),
        ('{"prefetch_timeout_base": 1e999}', "prefetch_timeout_base inf: expected a number"),
        ('{"prefetch_timeout_base": 1' + "0" * 400 + "}", "expected a number"),
        (
            '{"hicache_storage_pass_prefix_keys": 1}',
            "hicache_storage_pass_prefix_keys 1: expected true or false",
        ),
        ('{"fsync": "true"}', "fsync 'true': expected true or false"),
        ('{"file_storage_path": ""}', "file_storage_path '': expected the path of a folder"),
        ('{"file_storage_path": "a\\u0000"}', "expected the path of a folder"),
        ('{"max_size": "lots"}', "max_size 'lots': expected bytes"),
        ('{"max_size": 1.5}', "max_size 1.5: expected bytes"),
        ('{"max_size": -1}', "max_size -1: expected 0 to"),
        ('{"max_size": "9999999T"}', "max_size '9999999T': expected 0 to"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused_with_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        extra_config(text)
    assert message in str(refused.value)


def test_ranges_are_the_configurations_to_judge() -> None:
    with pytest.raises(ConfigError, match="prefetch_threshold -1"):
        StorageConfig(**extra_config('{"prefetch_threshold": -1}'))
    with pytest.raises(ConfigError, match=r"prefetch_timeout_base -1\.0"):
        StorageConfig(**extra_config('{"prefetch_timeout_base": -1}'))


def test_the_environment_sets_the_same_fields() -> None:
    environ = {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/data/kv",
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": "200G",
        "SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE": "",
        "SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO": "0.5",
        "HOME": "/root",
    }
    assert environment_config(environ) == {
        "directory": "/data/kv",
        "max_size_bytes": 200_000_000_000,
        "eviction_ratio": 0.5,
    }


@pytest.mark.parametrize(("name", "value"), [("MAX_SIZE", "much"), ("EVICTION_RATIO", "half")])
def test_a_variable_that_can_not_be_read_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"SGLANG_HICACHE_FILE_BACKEND_{name} '{value}'"):
        environment_config({f"SGLANG_HICACHE_FILE_BACKEND_{name}": value})
