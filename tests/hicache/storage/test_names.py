from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.storage.names import Contents, Names, names_of
from hicache.topology import Topology

H = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"


def name(topology: Topology, rank: int, pool: str = "kv", *, is_replicated: bool = False) -> str:
    names = names_of(topology, rank, Contents(model="org/m", is_replicated=is_replicated))
    return names.stem(pool, H).removeprefix(H) + ".bin"


def test_a_page_has_its_model_and_tensor_rank_in_its_name() -> None:
    assert name(Topology(tp=2), 1) == "_org-m_1_2.bin"


def test_a_pipeline_adds_its_size_and_stage() -> None:
    assert name(Topology(pp=2, tp=2), 1) == "_org-m_1_2_2_0.bin"
    assert name(Topology(pp=2, tp=2), 3) == "_org-m_1_2_2_1.bin"


def test_context_ranks_come_last() -> None:
    topology = Topology(pp=2, cp=4, tp=2)
    rank = topology.rank_at(dp=0, pp=0, cp=1, tp=1)
    assert name(topology, rank) == "_org-m_1_2_2_0_cp1_4.bin"


def test_replicated_kv_has_no_tensor_rank() -> None:
    assert name(Topology(tp=2), 1, is_replicated=True) == "_org-m.bin"
    assert name(Topology(pp=2, tp=2), 1, is_replicated=True) == "_org-m_2_0.bin"


def test_a_side_pool_comes_before_the_suffix() -> None:
    assert name(Topology(tp=2), 1, "indexer") == ".indexer_org-m_1_2.bin"
    assert name(Topology(tp=2), 1, "draft", is_replicated=True) == ".draft_org-m.bin"


def test_a_recurrent_state_always_has_its_tensor_rank() -> None:
    assert name(Topology(tp=2), 1, "mamba") == ".mamba_org-m_1_2.bin"
    assert name(Topology(pp=2, tp=2), 1, "mamba", is_replicated=True) == ".mamba_org-m_1_2_2_0.bin"


def test_replicas_share_names() -> None:
    assert name(Topology(dp=2, tp=2), 0) == name(Topology(dp=2, tp=2), 2)


def test_a_model_without_a_name_leaves_its_place_empty() -> None:
    assert names_of(Topology(), 0, Contents()).stem("kv", H) == f"{H}__0_1"


@pytest.mark.parametrize("model", ["a\0b", "a\nb", "\ud800"])
def test_a_model_that_no_file_name_can_hold_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="must be printable"):
        Contents(model=model)


@pytest.mark.parametrize("page_hash", ["", "../../etc/passwd", "a/b", "a.kv", "a_b", "é"])
def test_a_hash_that_could_leave_the_folder_is_a_programmer_error(page_hash: str) -> None:
    with pytest.raises(AssertionError, match="letters and digits"):
        names_of(Topology(), 0, Contents()).stem("kv", page_hash)


def test_a_pool_that_nobody_knows_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError, match=r"pool '\.\./x'"):
        names_of(Topology(), 0, Contents()).stem("../x", H)


@pytest.mark.parametrize(
    ("stem", "is_own"),
    [
        (f"{H}_m_1_2", True),
        (f"{H}.indexer_m_1_2", True),
        (f"{H}.mamba_m_1_2", True),
        (f"{H}_m_0_2", False),
        (f"{H}_x_m_1_2", False),
        (f"{H}.other_m_1_2", False),
        (f"{H}._m_1_2", False),
        (f"{H}.kv_m_1_2", False),
        ("_m_1_2", False),
        ("notes", False),
    ],
)
def test_only_names_that_this_rank_writes_are_its_own(stem: str, is_own: bool) -> None:
    names = names_of(Topology(tp=2), 1, Contents(model="m"))
    assert names.owns(stem) is is_own


def test_replicated_kv_belongs_to_the_first_tensor_rank_and_each_state_to_its_own() -> None:
    first, second = (names_of(Topology(tp=2), rank, Contents("m", is_replicated=True)) for rank in (0, 1))
    assert (first.owns(f"{H}_m"), second.owns(f"{H}_m")) == (True, False)
    assert (first.owns(f"{H}.mamba_m_1_2"), second.owns(f"{H}.mamba_m_1_2")) == (False, True)
    # A state under the shared suffix, or KV under a rank's, is nobody's.
    assert (first.owns(f"{H}.mamba_m"), second.owns(f"{H}_m_1_2")) == (False, False)


def test_models_that_share_a_name_have_other_identities() -> None:
    slash, dash = Contents(model="org/m"), Contents(model="org-m")
    assert names_of(Topology(), 0, slash) == names_of(Topology(), 0, dash)
    assert slash.identity(64) != dash.identity(64)


def test_every_part_of_the_contents_and_the_page_size_count_for_identity() -> None:
    contents = [
        Contents(),
        Contents(model="a"),
        Contents(dtype="a"),
        Contents(layout="a"),
        Contents(weights="a"),
        Contents(is_replicated=True),
    ]
    identities = [each.identity(64) for each in contents] + [Contents().identity(128)]
    assert len(set(identities)) == 7
    assert {len(identity) for identity in identities} == {16}


def test_an_identity_is_the_same_in_every_process_and_version() -> None:
    assert (
        Contents("m", "bfloat16", "page_first", "r1").identity(64).hex() == "e99be7714a61a5ce410ee7956dde7074"
    )


def test_a_name_is_found_again_for_every_pool() -> None:
    names = Names("_m", "_m_0_2", writes_kv=True)
    for pool in ("kv", "mamba", "draft", "indexer", "swa", "compressed_14"):
        assert names.owns(names.stem(pool, H)), pool
