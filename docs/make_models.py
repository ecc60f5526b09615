"""Write `docs/models.md` from the grid of models and the results of `make test-models`.

usage: make docs    (a test fails if the page is outdated)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
from known_pipelines import MEANING, everything

from carpool.models.grid import proof, rows, short

PAGE = Path(__file__).parent / "models.md"


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# Models",
            "",
            "`make docs` writes this page from `src/carpool/models/grid.json` and the results of "
            "`make test-models`. `carpool models` prints the same.",
            "",
            "Each row was proven on tiny random checkpoints of the same pipeline classes, in "
            "float32 on a CPU: requests with different steps, guidance, seeds, prompts and arrival "
            "times ran together, one was cancelled and one failed, and each result equals plain "
            "diffusers' to 2e-5 (pictures) or 1e-4 (video, sound). Published weights were not "
            "available. Other diffusers pipelines run, too: see "
            "[below](#every-pipeline-class).",
            "",
            "| family | examples on the hub | tasks | fuses | alone | sizes | LoRA | limits |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(_row, rows()),
            "",
            "## Measurements",
            "",
            "Mean requests per forward of a run in which requests join and leave; with equal "
            "steps more of them share.",
            "",
            "| row of the matrix | pipeline | requests per forward | largest difference |",
            "| --- | --- | --- | --- |",
            *_measured(),
            "",
            "## Every pipeline class",
            "",
            f"All pipeline classes of diffusers {diffusers.__version__} "
            "(`docs/known_pipelines.py`). The last column has the requests per forward of the "
            "denoiser for six requests of mixed steps at once (`make sharing`, tiny models, "
            "maximal sharing). `carpool check MODEL` proves a model on your machine.",
            "",
            *_classes(),
        ]
    )


def _row(row: dict[str, Any]) -> str:
    cells = (
        row["family"],
        "<br>".join(f"`{hub}`" for hub in row["hub_ids"]),
        ", ".join(row["tasks"]) or "-",
        ", ".join(map(short, row["fuses"])) or "-",
        ", ".join(map(short, row["alone"])) or "-",
        ("mixed" if row["mixed_sizes"] else "equal") if row["tasks"] else "-",
        "yes" if row["lora"] else "no",
        row["limits"],
    )
    return f"| {' | '.join(cells)} |"


def _measured() -> Iterator[str]:
    for name, results in sorted(proof().items()):
        widths = ", ".join(f"{short(m)} {n}" for m, n in results["requests_per_forward"].items())
        yield f"| {name} | {results['pipeline']} | {widths} | {results['largest_difference']:.0e} |"


def _classes() -> Iterator[str]:
    entries = everything()
    for state, meaning in MEANING.items():
        selected = [entry for entry in entries if entry.known == state]
        yield f"**{state}** ({len(selected)}): {meaning}."
        yield ""
        yield "| class | how, or why not | denoisers fuse by | requests a forward, six at once |"
        yield "| --- | --- | --- | --- |"
        for entry in selected:
            cells = entry.how or "-", entry.denoisers or "-", entry.shares or "-"
            yield f"| `{entry.pipeline}` | {' | '.join(cells)} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
