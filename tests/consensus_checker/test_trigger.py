"""Which local fact explains a difference, and which are exonerated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history, lanes
from tracer.record import Kind


def finding_of(text: str) -> Finding:
    return check(history(text)).finding


def test_a_declared_need_explains_first() -> None:
    finding = finding_of("""
        0  backup:17=64{host_pages_free=5 write_queue_len=1}
        1  backup:17=64{host_pages_free=5 write_queue_len=1}
        2  backup:17=0{host_pages_free=0 write_queue_len=7}
    """)
    assert finding.trigger is not None
    assert (
        finding.trigger.fact,
        finding.trigger.rank,
        finding.trigger.values,
    ) == ("host_pages_free", 2, {0: 5, 1: 5, 2: 0})
    # The queue's length differs too: it may have been that.
    assert (finding.level, finding.resembles) == ("medium", ("HC02",))
    assert len(finding.alternatives) == 1


def test_enough_room_on_all_ranks_is_no_explanation_by_need() -> None:
    finding = finding_of("""
        0  backup:16=64{host_pages_free=5}  backup:17=64{host_pages_free=5}
        1  backup:16=64{host_pages_free=5}  backup:17=64{host_pages_free=5}
        2  backup:16=64{host_pages_free=3}  backup:17=0{host_pages_free=3}
    """)
    assert (finding.trigger, finding.level, finding.resembles) == (None, "medium", ())


def test_a_fact_that_differed_alike_before_is_exonerated() -> None:
    finding = finding_of("""
        0  round?{writes_done=2 loads_done=1}  round=0  round?{writes_done=2 loads_done=1}  round=1
        1  round?{writes_done=2 loads_done=1}  round=0  round?{writes_done=2 loads_done=1}  round=1
        2  round?{writes_done=0 loads_done=1}  round=0  round?{writes_done=0 loads_done=0}  round=0
    """)
    assert finding.trigger is not None
    assert (finding.trigger.fact, finding.level, finding.alternatives) == ("loads_done", "medium", ())


def test_a_limit_that_was_never_straddled_is_left() -> None:
    finding = finding_of("""
        0  round?{writes_done=3}  round=0  round?{writes_done=3}  round=1
        1  round?{writes_done=3}  round=0  round?{writes_done=3}  round=1
        2  round?{writes_done=1}  round=0  round?{writes_done=0}  round=0
    """)
    assert finding.trigger is not None
    assert finding.trigger.fact == "writes_done"


def test_two_facts_that_could_explain_lower_the_confidence() -> None:
    finding = finding_of("""
        0  round?{writes_done=2 loads_done=1}  round=1
        1  round?{writes_done=2 loads_done=1}  round=1
        2  round?{writes_done=0 loads_done=0}  round=0
    """)
    assert (finding.level, len(finding.alternatives)) == ("medium", 1)


def test_a_fact_that_never_differed_goes_before_one_that_did() -> None:
    finding = finding_of("""
        0  round?{writes_done=9 loads_done=1}  round=0  round?{writes_done=5 loads_done=1}  round=1
        1  round?{writes_done=9 loads_done=1}  round=0  round?{writes_done=5 loads_done=1}  round=1
        2  round?{writes_done=8 loads_done=1}  round=0  round?{writes_done=0 loads_done=0}  round=0
    """)
    assert finding.trigger is not None
    assert finding.trigger.fact == "loads_done"


def test_a_flag_explains_unless_the_pair_met_before() -> None:
    finding = finding_of("""
        0  match:r1=64{ready=true}  match:r2=64{ready=true}
        1  match:r1=64{ready=true}  match:r2=64{ready=true}
        2  match:r1=64{ready=true}  match:r2=0{ready=false}
    """)
    assert finding.trigger is not None
    assert finding.trigger.fact == "ready"
    again = finding_of("""
        0  match:r1=64{ready=true}   match:r2=64{ready=true}
        1  match:r1=64{ready=true}   match:r2=64{ready=true}
        2  match:r1=64{ready=false}  match:r2=0{ready=false}
    """)
    assert again.trigger is None


def test_a_skipped_meeting_is_explained_by_the_call_it_is_in() -> None:
    finding = finding_of("""
        0  round?{writes_done=1 loads_done=0}  events!  #hung
        1  round?{writes_done=1 loads_done=0}  events!  #hung
        2  round?{writes_done=0 loads_done=0}  round=0  main!  #hung
    """)
    assert finding.trigger is not None
    assert (
        finding.trigger.fact,
        finding.trigger.rank,
        finding.resembles,
        finding.level,
    ) == ("writes_done", 2, ("HC01",), "medium")


def test_a_tie_has_a_fact_but_no_culprit() -> None:
    finding = finding_of("0 backup:17=64{host_pages_free=5}\n1 backup:17=0{host_pages_free=0}")
    assert finding.trigger is not None
    assert (finding.trigger.rank, finding.culprit, finding.unknown) == (None, (), (0, 1))


def with_past(past: str, *last: str) -> Finding:
    return finding_of("\n".join(f"{rank}  {past} {text}" for rank, text in enumerate(last)))


def test_a_need_explains_nothing_against_its_direction() -> None:
    # Rank 2 had no room and made the backup all the same, the others had and refused.
    finding = with_past("", *["backup:17=0{host_pages_free=5}"] * 2, "backup:17=64{host_pages_free=0}")
    assert (finding.level, finding.trigger and finding.trigger.need) == ("medium", None)


def test_a_need_explains_nothing_but_the_result() -> None:
    finding = with_past("", *["backup:17=64{host_pages_free=5}"] * 2, "backup:18=64{host_pages_free=0}")
    assert (finding.level, finding.trigger and finding.trigger.need) == ("medium", None)


def test_a_need_that_some_ranks_lacked_before_is_exonerated() -> None:
    finding = finding_of("""
        0  backup:16=64{host_pages_free=5}  backup:17=64{host_pages_free=5}
        1  backup:16=64{host_pages_free=5}  backup:17=64{host_pages_free=5}
        2  backup:16=64{host_pages_free=0}  backup:17=0{host_pages_free=0}
    """)
    assert (finding.trigger, finding.level, finding.resembles) == (None, "medium", ())


def test_a_fact_without_a_need_is_sure_only_after_enough_earlier_calls() -> None:
    good, bad = "round?{writes_done=1} round=1", "round?{writes_done=0} round=0"
    for count, level in ((7, "medium"), (8, "high")):
        finding = with_past("round?{writes_done=2} round=1 " * count, good, good, bad)
        assert (finding.trigger and finding.trigger.fact, finding.level) == ("writes_done", level)


def test_a_fact_of_the_decision_before_is_not_sure_and_says_where_it_is_from() -> None:
    past = "match:r0=1{host_pages_free=5} " * 9
    finding = finding_of(f"""
        0  {past} match:r1=1{{host_pages_free=5}} admit:r1=1
        1  {past} match:r1=1{{host_pages_free=5}} admit:r1=1
        2  {past} match:r1=1{{host_pages_free=2}} admit:r1=0
    """)
    assert finding.trigger is not None
    assert finding.level == "medium"
    assert finding.trigger.summary == (
        "host_pages_free was 2 on rank 2 and 5 on ranks 0-1, at the match before, on which they agreed"
    )


def test_a_null_explains_nothing() -> None:
    good, bad = "match:r1=64{host_pages_free=3}", "match:r1=0{host_pages_free=null}"
    assert with_past("", good, good, bad).trigger is None


def test_each_odd_side_has_its_own_fact() -> None:
    finding = finding_of("""
        0  match:r1=64{host_pages_free=5}
        1  match:r1=64{host_pages_free=5}
        2  match:r1=64{host_pages_free=5}
        3  match:r1=0{host_pages_free=0}
        4  match:r1=32{host_pages_free=9}
    """)
    assert finding.trigger is not None
    assert (finding.trigger.rank, finding.level) == (3, "medium")
    assert [entry.summary for entry in finding.alternatives] == [
        "host_pages_free was 9 on rank 4 and 5 on ranks 0-2"
    ]


def test_what_was_ready_when_a_call_began_explains_only_what_the_leader_decides() -> None:
    good = "round?{writes_done=1} round=1:7"
    past = "round?{writes_done=1} round=1:2 " * 9
    queued = with_past(past, good, good, good.replace("=1}", "=0}").replace("1:7", "1:8"))
    assert (queued.culprit, queued.trigger) == ((2,), None)
    agreed = with_past(past, good, good, good.replace("=1}", "=0}").replace("1:7", "0:7"))
    assert agreed.trigger is not None
    assert agreed.trigger.fact == "writes_done"


def test_what_a_leader_counts_explains_no_other_decision_that_wrote_it_down() -> None:
    drawn = lanes("\n".join(f"{rank}  match:r0=1 | match:r1={value}" for rank, value in enumerate((1, 1, 2))))
    kinds = {**drawn[0].kinds, "match": replace(drawn[0].kinds["match"], local=("writes_done",))}
    for lane in drawn:
        lane.header["kinds"]["match"]["local"] = ["writes_done"]
        for record in lane.entries:
            record["writes_done"] = int(lane.rank == 2 and record["rid"] == "r1")  # type: ignore[index]
    finding = check([replace(lane, kinds=kinds) for lane in drawn]).finding
    assert (finding.culprit, finding.trigger) == ((2,), None)


def test_a_trigger_says_since_when_its_fact_has_told_the_ranks_apart() -> None:
    text = """
        0  backup:1=64{host_pages_free=9} | match:r1=64{host_pages_free=8} | backup:2=64{host_pages_free=5}
        1  backup:1=64{host_pages_free=9} | match:r1=64{host_pages_free=8} | backup:2=64{host_pages_free=5}
        2  backup:1=64{host_pages_free=9} | match:r1=64{host_pages_free=2} | backup:2=0{host_pages_free=0}
    """
    trigger = check(history(text)).finding.trigger
    assert trigger is not None
    assert (trigger.step, trigger.since_step) == (2, 1)
    assert trigger.summary.endswith("apart since step 1")


def test_a_fact_that_was_alike_in_between_is_apart_only_since_then() -> None:
    text = """
        0  match:r0=1{host_pages_free=9} | match:r1=1{host_pages_free=8} | backup:2=64{host_pages_free=5}
        1  match:r0=1{host_pages_free=9} | match:r1=1{host_pages_free=8} | backup:2=64{host_pages_free=5}
        2  match:r0=1{host_pages_free=7} | match:r1=1{host_pages_free=8} | backup:2=0{host_pages_free=0}
    """
    trigger = check(history(text)).finding.trigger
    assert trigger is not None and trigger.since_step == 2
    assert "since" not in trigger.summary


def test_a_fact_that_feeds_another_field_explains_nothing() -> None:
    """`hits_ready` goes into `queued`, and that is equal: that it differs as well is a coincidence."""
    text = """
        0  round?{writes_done=1 hits_ready=0}  round=1:7
        1  round?{writes_done=1 hits_ready=0}  round=1:7
        2  round?{writes_done=1 hits_ready=3}  round=2:7
    """
    assert check(history(text)).finding.trigger is None
    fed = text.replace("writes_done=1 hits_ready=3", "writes_done=4 hits_ready=3")
    trigger = check(history(fed)).finding.trigger
    assert trigger is not None and trigger.fact == "writes_done"


def test_what_feeds_a_field_is_in_the_header() -> None:
    kind = Kind(
        "round", "decision", agree=("tp",), compared=("agreed",), local=("done",), feeds={"done": "agreed"}
    )
    assert Kind.from_declaration("round", kind.declaration()) == kind
    with pytest.raises(ValueError, match="feeds agreed, which is not compared"):
        Kind.from_declaration("round", {"role": "note", "local": ["done"], "feeds": {"done": "agreed"}})
    with pytest.raises(ValueError, match="feeds is not a map"):
        Kind.from_declaration("round", {"role": "note", "feeds": ["done"]})
