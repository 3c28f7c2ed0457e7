from __future__ import annotations

import random
import time

import pytest

from hicache.control.keys import pack
from hicache.control.mail import Mail, decode, encode
from hicache.core import Abort, Arrival, Command, Request

PLAIN_REQUEST = Request("r1", pack([1, 2, 3]), pack([9]), 1)


def test_the_mail_of_most_steps_is_one_byte() -> None:
    assert len(encode(Mail([], False))) == 1
    assert decode(encode(Mail([], False))) == Mail([], False)


def test_the_last_mail_says_so() -> None:
    assert decode(encode(Mail([], True))) == Mail([], True)


def test_arrivals_keep_their_order() -> None:
    arrivals: list[Arrival] = [
        Command("flush"),
        PLAIN_REQUEST,
        Abort("r1"),
        Command("attach"),
        PLAIN_REQUEST,
        Command("detach"),
    ]
    assert decode(encode(Mail(arrivals, False))) == Mail(arrivals, False)


@pytest.mark.parametrize(
    "request_",
    [
        Request("", b"", b"", 0),
        Request("ünïcode/東京 🦊", pack([1]), b"", 7, "Gespräch", 1 << 42, 5, "lora-ä", "salz"),
        Request("half \ud83d", pack([1]), pack([2]), 1),
        Request("low", pack([0, (1 << 32) - 1]), b"", 1 << 24, priority=-(1 << 63)),
        Request("high", pack([1]), b"", 1, priority=(1 << 63) - 1),
        Request("nul\0inside", pack([1]), b"", 1, cache_salt="\n"),
    ],
    ids=["empty", "wide text", "half a surrogate pair", "lowest", "highest", "control characters"],
)
def test_a_request_comes_out_as_it_went_in(request_: Request) -> None:
    assert decode(encode(Mail([request_], False))).arrivals == [request_]


def test_any_mail_comes_out_as_it_went_in() -> None:
    chance = random.Random(4)

    def word() -> str:
        return "".join(chance.choice("ab\0é東🦊/ ") for _ in range(chance.randint(0, 6)))

    def arrival() -> Arrival:
        kind = chance.randint(0, 2)
        if kind == 0:
            return Abort(word())
        if kind == 1:
            return Command(chance.choice(("flush", "attach", "detach")))
        return Request(
            word(),
            chance.randbytes(4 * chance.randint(0, 40)),
            chance.randbytes(4 * chance.randint(0, 40)),
            chance.randint(0, 1 << 24),
            word(),
            chance.randint(0, 1 << 42),
            chance.randint(-(1 << 63), (1 << 63) - 1),
            word(),
            word(),
        )

    for _ in range(300):
        mail = Mail([arrival() for _ in range(chance.randint(0, 5))], chance.random() < 0.5)
        assert decode(encode(mail)) == mail


def test_a_long_prompt_costs_its_copies_and_no_more() -> None:
    """160,000 tokens there and back: under 5 ms where a pass over the tokens would take 10."""
    prompt = random.Random(1).randbytes(160_000 * 4)
    mail = Mail([Request("long", prompt, b"", 1)], False)
    took = min(_seconds(mail) for _ in range(5))
    assert took < 0.005, f"{took * 1e3:.2f} ms"


def _seconds(mail: Mail) -> float:
    begin = time.perf_counter()
    decode(encode(mail))
    return time.perf_counter() - begin


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_cut_mail_is_refused(cut: int) -> None:
    message = encode(Mail([PLAIN_REQUEST], False))
    with pytest.raises(AssertionError, match="mail: "):
        decode(message[:-cut])
