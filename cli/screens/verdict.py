"""A verdict on the screen: the checker's own lines with colour, nothing added and nothing left out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from cli.theme import BAD, COMMAND, DOUBT, GOOD, HEADING, LABEL

STYLES = {"consistent": GOOD, "incomplete": DOUBT, "nothing_compared": DOUBT, "undetermined": DOUBT}
# A label of a paragraph: two spaces, a word, and the text from column 10 on.
LABELLED = re.compile(r"  ([A-Za-z]+) +(?=\S)")
ODD_RANK = re.compile(r"rank \d+ (<<|\?)")


def coloured(lines: Sequence[str], kind: str) -> list[Text]:
    """The first screen of a verdict of `kind`."""
    return [
        _coloured(line, STYLES.get(kind, BAD), is_headline=number == 0) for number, line in enumerate(lines)
    ]


def _coloured(line: str, style: str, *, is_headline: bool) -> Text:
    text = Text(line)
    if is_headline:
        text.stylize(style, 0, line.find(" ") if " " in line else len(line))
    elif line.startswith(">"):
        text.stylize(HEADING)
    elif odd := ODD_RANK.search(line):
        text.stylize(style, *odd.span())
    elif label := LABELLED.match(line):
        text.stylize(LABEL, *label.span(1))
        if label[1] == "next":
            text.stylize(COMMAND, label.end())
    return text
