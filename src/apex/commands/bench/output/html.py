"""What the HTML pages of reports are made of: no network, no other files, readable on a phone.

The templates are in ``templates``: ``base.html.j2`` is what pages share. Jinja2 escapes whatever
it puts in, because names of tasks and texts of errors are the user's; only the plots' SVG, in which
matplotlib has escaped them, goes in as it is. Jinja2 comes with the ``bench`` extra and is imported
where it is used.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from apex.commands.bench.output.figures import INK, PANEL, Drawn
from apex.commands.tables import NOTHING, Column, filled, jsonable

__all__ = ["Cell", "about_columns", "column_table", "flat", "join", "plot", "render", "table"]

T = TypeVar("T")
Cell = tuple[str, Any]  # the text, and what the page sorts by where that is a number


def render(
    template: str,
    path: Path,
    *,
    environment: dict[str, Any],
    content: dict[str, Any],
    colour: Callable[[str], str],
    **more: Any,
) -> None:
    """Write a page: ``content`` is what the JSON file has, ``more`` what else it shows.

    ``environment`` is the report's; ``colour`` is that of a level.
    """
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    text = made.get_template(template).render(
        date=str(environment.get("date", "")).replace("T", " ").replace("+00:00", " UTC"),
        facts=list(flat(environment)),
        content=jsonable(content),
        colour=lambda name: colour(name).replace(INK, "currentColor"),
        nothing=NOTHING,
        **more,
    )
    path.write_text(text, encoding="utf-8")


def plot(drawn: Drawn, caption: str) -> dict[str, Any]:
    """Make a plot part of a page: the text colour is the page's, and ids that nobody uses go."""
    from markupsafe import Markup

    width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', drawn.wide)
    panels = max(1, round(float(width[1]) / 72 / PANEL[0])) if width else 1
    bare = [re.sub(r' id="[\w.]+_\d+"', "", svg[svg.index("<svg") :]) for svg in drawn if svg]
    svgs = [Markup(svg.replace(INK, "currentColor")) for svg in bare]
    return {"svgs": svgs, "panels": panels, "caption": caption}


def table(of: Sequence[tuple[str, dict[str, Cell]]]) -> dict[str, Any]:
    """Make what the template's table takes of records with the same names, and their labels."""
    heads = [head for head in (of[0][1] if of else {}) if any(r[head][0] != NOTHING for _, r in of)]
    for name in ("task", "batch"):
        if len({cells[name] for _, cells in of if name in cells}) == 1:
            heads.remove(name)  # the page names it above
    return {
        "heads": heads,
        "rows": [{"label": label, "cells": [cells[head] for head in heads]} for label, cells in of],
    }


def column_table(
    columns: Sequence[Column[T]], of: Sequence[T], label: Callable[[T], str]
) -> dict[str, Any]:
    """Make a table of what columns say; ``label`` gives what `render`'s ``colour`` takes."""
    found = {
        _flatten(c.heading): (c.text, next(iter(c.numbers.values()))) for c in filled(columns, of)
    }
    return table(
        [(label(x), {head: (text(x), n(x)) for head, (text, n) in found.items()}) for x in of]
    )


def about_columns(columns: Sequence[Column[T]], of: Sequence[T]) -> dict[str, list[Cell]]:
    """Say what the columns mean, and why numbers are missing where some are."""
    return {
        "meanings": [(_flatten(c.heading), c.meaning) for c in columns if c.meaning],
        "absent": [
            (_flatten(c.heading), c.absent)
            for c in columns
            if c.absent and any(c.text(line) == NOTHING for line in of)
        ],
    }


def _flatten(heading: str) -> str:
    return heading.replace("\n", " ")


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """List the environment: nested names joined, a list in one line."""
    for name, value in values.items():
        named = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} ")
        elif isinstance(value, (list, tuple)):
            items = [item.values() if isinstance(item, dict) else [item] for item in value]
            yield named, "; ".join(join(item) for item in items)
        else:
            yield named, _plain(value)


def join(values: Iterable[Any]) -> str:
    """Write values for people."""
    return ", ".join(map(_plain, values))


def _plain(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
