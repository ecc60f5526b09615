"""Markdown tables of reports."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table: text in the first column, numbers in the rest."""
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, marks, *rows))
