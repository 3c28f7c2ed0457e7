"""Which local fact explains a difference, and which are exonerated."""

from __future__ import annotations

from consensus_checker.check import check
from consensus_checker.finding import Finding
from tests.support.history import history


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
    assert (finding.level, finding.resembles) == ("high", ("HC02",))
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
    assert (finding.trigger.fact, finding.level, finding.alternatives) == ("loads_done", "high", ())


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
    ) == ("writes_done", 2, ("HC01",), "high")


def test_a_tie_has_a_fact_but_no_culprit() -> None:
    finding = finding_of("0 backup:17=64{host_pages_free=5}\n1 backup:17=0{host_pages_free=0}")
    assert finding.trigger is not None
    assert (finding.trigger.rank, finding.culprit, finding.unknown) == (None, (), (0, 1))
