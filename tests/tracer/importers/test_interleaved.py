from __future__ import annotations

import re

import pytest

from tracer.importers.interleaved import untangled

OWN_LINE = re.compile(rb"\[date \d+\] ")
HEAD = re.compile(rb"\[date \d+\] list = \[")


def events(count: int = 40, odd: str = "") -> bytes:
    """What a list says from its first event on; `odd` stands in the place of event 25."""
    found = [f"event {index} has {index * 7919}" for index in range(count)]
    if odd:
        found[25] = odd
    return f"{found}\n".encode()[1:]


def untangle(text: bytes) -> set[bytes]:
    starts = [(match.start(), match.end()) for match in HEAD.finditer(text)]
    return untangled(text, events(), starts, OWN_LINE)


def lines(*lists: bytes) -> list[bytes]:
    return [b"[date %d] list = [" % number + text for number, text in enumerate(lists)]


@pytest.mark.parametrize(
    "odd", ["event 25 has 0", "something else", "", "event 25 has 197975', 'one more"], ids=repr
)
def test_pieces_of_two_lists_are_followed_to_both_ends(odd: str) -> None:
    one, two = lines(events(), events(odd=odd))
    text = one[:300] + two[:500] + one[300:650] + two[500:800] + one[650:] + two[800:]
    assert untangle(text) == {events(), events(odd=odd)}


def test_a_call_that_is_missing_in_one_is_stepped_over() -> None:
    short = events().replace(b"'event 25 has 197975', ", b"")
    one, two = lines(events(), short)
    assert untangle(two[:400] + one[:700] + two[400:] + one[700:]) == {events(), short}


def test_a_list_that_is_another_up_to_its_end_is_followed_to_that() -> None:
    other = events()[:-60] + b"', 'another end', 'and more']\n"
    one, two = lines(events(), other)
    assert untangle(one[:400] + two[:700] + one[400:] + two[700:]) == {events(), other}


def test_pieces_of_three_and_a_short_line_of_a_fourth_are_kept_apart() -> None:
    one, two, three = lines(events(), events(odd="mine"), events())
    text = one[:200] + two[:333] + three[:250] + b"[date 9] hello\n" + one[200:900] + three[250:] + two[333:]
    assert untangle(text + one[900:]) == {events(), events(odd="mine")}


def test_two_that_are_at_the_same_place_may_have_changed_their_rests() -> None:
    one, two = lines(events(), events(odd="mine"))
    assert untangle(one[:400] + two[:400] + one[400:] + two[400:]) == {events(), events(odd="mine")}


@pytest.mark.parametrize("before", [41, 50, 64])
def test_two_at_one_place_that_go_on_in_a_way_of_their_own_end(before: int) -> None:
    odd = events(odd="something else")
    one, two = lines(odd, odd)
    cut = one.index(b"something else") - before
    # Whose it is can't be told: both would say the same, and then neither would.
    assert untangle(one[:cut] + two[:cut] + one[cut:] + two[cut:]) == {odd}


def test_a_list_whose_rest_did_not_come_is_left_out() -> None:
    one, two = lines(events(), events(odd="mine"))
    assert untangle(one[:400] + two + one[400:600]) == {events(odd="mine")}


@pytest.mark.parametrize("text", [b"", b"no list\n", b"[date 1] list = ["])
def test_what_is_no_such_text_gives_nothing(text: bytes) -> None:
    assert untangle(text) == set()


def test_lists_that_have_nothing_in_common_are_given_up_soon() -> None:
    one = b"[date 1] list = [" + b"".join(b"'event %d has', 'x', " % (index * 7) for index in range(9999))
    assert untangle(one) == set()
