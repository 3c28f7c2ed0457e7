"""`hicache explain`: what a rule says, from which evidence, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.errors import OK, CliError
from cli.options import Json

SCHEMA = "hicache.explain.v1"
NEAR_MAX = 3


def explain(
    name: Annotated[
        str | None,
        typer.Argument(metavar="RULE", help="A rule, or a class of bugs such as HC02.", show_default=False),
    ] = None,
    all_pages: Annotated[bool, typer.Option("--list", help="Every page, with its first sentence.")] = False,
    json: Json = False,
) -> int:
    """Explain what a verdict names: a rule, or a class of known bugs.

    A page has the rule's equation, the smallest evidence that breaks it, what it can't see, and what to do.
    """
    from cli.theme import show, show_json
    from consensus_checker.pages import first_sentence, names, page

    if all_pages or name is None:
        told = {one: first_sentence(one) for one in names()}
        if json:
            show_json(
                {"schema": SCHEMA, "pages": [{"name": one, "says": said} for one, said in told.items()]}
            )
        else:
            show(listed(told))
        return OK
    found = page(name)
    if found is None:
        raise CliError(f"no rule or class {name}", expected=_near(name), hint="hicache explain --list")
    if json:
        show_json({"schema": SCHEMA, "name": found.name, "says": found.says, "sections": found.sections})
    else:
        show(narrow(found.text))
    return OK


def narrow(text: str) -> list[str]:
    """A page at 80 columns: prose is wrapped anew, rows of a table become items, drawings stay."""
    from textwrap import wrap

    from cli.theme import WIDTH

    lines: list[str] = []
    prose: list[str] = []
    is_drawing = False

    def flush() -> None:
        if prose:
            lines.extend(wrap(" ".join(prose), WIDTH, break_on_hyphens=False, break_long_words=False))
            prose.clear()

    for line in text.rstrip("\n").split("\n"):
        is_fence = line.startswith("```")
        if is_fence or is_drawing or not line or line.startswith((" ", "#")):
            flush()
            lines += [] if is_fence else _drawn(f"    {line}".rstrip() if is_drawing else line)
        elif line.startswith("|"):
            flush()
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if set("".join(cells)) - {"-"}:
                item = "- " + " | ".join(cells)
                lines += wrap(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        else:
            prose.append(line.strip())
        is_drawing ^= is_fence
    flush()
    return lines


def _drawn(line: str) -> list[str]:
    """A line of an equation or drawing; what does not fit goes on below, further in."""
    from textwrap import wrap

    from cli.theme import WIDTH

    inside = " " * (len(line) - len(line.lstrip()) + 8)
    return wrap(line, WIDTH, subsequent_indent=inside, break_on_hyphens=False) or [""]


def listed(told: dict[str, str]) -> list[str]:
    """Names beside their sentences, at 80 columns."""
    from textwrap import wrap

    from cli.theme import WIDTH

    room = max(map(len, told)) + 2
    lines: list[str] = []
    for name, said in told.items():
        first, *rest = wrap(said, WIDTH - room) or [""]
        lines += [f"{name.ljust(room)}{first}".rstrip(), *(" " * room + line for line in rest)]
    return lines


def _near(name: str) -> str:
    from difflib import get_close_matches

    from consensus_checker.pages import names

    near = get_close_matches(name, names(), n=NEAR_MAX, cutoff=0.6)
    return ", ".join(near) if near else "a rule that a verdict names, or HC01 to HC17"
