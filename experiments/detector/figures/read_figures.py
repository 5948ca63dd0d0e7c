"""Read the paper's figures that are drawn as vectors (4, 6, 7, 13, 14, 15, 16).

    python read_figures.py secrets_of_rlhf_part_1.pdf     # needs pymupdf

Writes a table for each run beside this file, see README.md.
"""

from __future__ import annotations

import csv
import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

COLORS = {"ff8c00": 0, "ff0000": 1, "5f9ea0": 2, "dda0dd": 3, "6a5acd": 4}
"""Place of a colour in the legends."""
FIGURES = {
    # page (from 0), part of the page (top, bottom in points), panels by place, runs by colour
    "figure4": (
        10,
        (70, 275),
        ["reward", "-", "-", "kl_per_token", "perplexity", "length"],
        {0: ""},
    ),
    "figure6": (
        12,
        (70, 350),
        ["reward", "length", "kl_per_token", "perplexity"],
        {
            0: "reward_scaling",
            1: "reward_norm_clip_0.3",
            2: "reward_norm_clip_0.8",
            3: "advantage_norm_clip_0.5",
            4: "advantage_norm_clip_0.12",
        },
    ),
    "figure7": (
        13,
        (70, 350),
        ["reward", "length", "kl_per_token", "perplexity"],
        {
            0: "kl_penalty",
            1: "entropy_bonus",
            2: "importance_sampling",
            4: "kl_penalty_importance_sampling",
        },
    ),
    "figure14": (
        25,
        (190, 420),
        ["reward", "length", "kl_per_token", "perplexity"],
        {
            0: "reward_0.8_advantage_0.8",
            1: "reward_0.8_advantage_0.8_value_clip",
            2: "reward_0.8_advantage_value_clip",
            3: "reward_0.8_value_clip",
            4: "reward_scaling_advantage_0.8_value_clip",
        },
    ),
    "figure15": (
        26,
        (90, 290),
        ["reward", "length", "kl_per_token", "perplexity"],
        {0: "kl_0.05", 2: "kl_0.1", 4: "kl_0.2"},
    ),
    "figure16": (
        26,
        (405, 610),
        ["reward", "length", "kl_per_token", "perplexity"],
        {0: "entropy_bonus", 4: "entropy_bonus_clip_30"},
    ),
}


def number(word: str) -> float | None:
    """The number of a tick's label, without its sign."""
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


def main(pdf: str) -> None:
    """Read the figures of the PDF and write the tables."""
    import pymupdf

    document: Any = pymupdf.open(pdf)
    read_distributions(document[24])
    for figure, (place, (top, bottom), panels, runs) in FIGURES.items():
        page = document[place]
        drawings = page.get_drawings()
        frames = {
            tuple(round(v, 1) for v in (d["rect"].x0, d["rect"].x1, d["rect"].y0, d["rect"].y1))
            for d in drawings
            if len(d["items"]) == 1 and d["color"] == (0, 0, 0) and d["rect"].y0 == d["rect"].y1
        }
        edges: dict[tuple[float, float], list[float]] = {}
        for x0, x1, y, _ in frames:
            if top < y < bottom and x1 - x0 > 60:
                edges.setdefault((x0, x1), []).append(y)
        boxes = sorted(
            (
                (min(pair), max(pair), *xs)
                for xs, ys in edges.items()
                for pair in zip(sorted(ys)[::2], sorted(ys)[1::2], strict=True)
            ),
            key=lambda box: (round(box[0] / 40), box[2]),
        )
        assert len(boxes) == len(panels), (figure, boxes)
        words = [(w[0], w[1], w[2], w[3], number(w[4])) for w in page.get_text("words")]
        curves: dict[str, dict[str, list[float]]] = {}
        for panel, (y0, y1, x0, x1) in zip(panels, boxes, strict=True):
            left = [
                ((b + d) / 2, v)
                for a, b, c, d, v in words
                if v is not None and x0 - 14 < c < x0 + 1 and y0 - 3 < (b + d) / 2 < y1 + 3
            ]
            below = [
                ((a + c) / 2, v)
                for a, b, c, d, v in words
                if v is not None and y1 - 1 < b < y1 + 8 and x0 - 4 < (a + c) / 2 < x1 + 4
            ]
            # signs are missing: the two highest labels of an axis are positive everywhere
            (ya, va), (yb, vb) = sorted(left)[:2]
            xa, sa = sorted(below)[0]
            xb, sb = sorted(below)[-1]
            for drawing in drawings:
                rect = drawing["rect"]
                items = drawing["items"]
                inside = x0 <= rect.x0 and rect.x1 <= x1 and y0 <= rect.y0 and rect.y1 <= y1
                if panel == "-" or drawing["type"] != "s" or len(items) < 70 or not inside:
                    continue
                color = "".join(f"{round(part * 255):02x}" for part in drawing["color"])
                points = [items[0][1], *(item[2] for item in items)]
                run = curves.setdefault(runs[COLORS[color]], {})
                run["update"] = [sa + (p.x - xa) / (xb - xa) * (sb - sa) for p in points]
                run[panel] = [va + (p.y - ya) / (yb - ya) * (vb - va) for p in points]
            if figure == "figure4" and panel == "reward":
                # the win rate: a red line of eleven points, with an axis at the right
                (ya, va), (yb, vb) = sorted(
                    ((b + d) / 2, v)
                    for a, b, c, d, v in words
                    if v is not None and x1 < a < x1 + 12 and y0 - 3 < (b + d) / 2 < y1 + 3
                )[:2]
                (line,) = (
                    d["items"]
                    for d in drawings
                    if d["type"] == "s" and d["color"] == (1, 0, 0) and len(d["items"]) == 10
                )
                points = [line[0][1], *(item[2] for item in line)]
                updates = [sa + (p.x - xa) / (xb - xa) * (sb - sa) for p in points]
                rates = [va + (p.y - ya) / (yb - ya) * (vb - va) for p in points]
                curves[""]["win_rate"] = [
                    next(
                        rates[i]
                        + (x - updates[i])
                        / (updates[i + 1] - updates[i])
                        * (rates[i + 1] - rates[i])
                        for i in range(10)
                        if x <= updates[i + 1] + 1
                    )
                    for x in curves[""]["update"]
                ]
        for run_name, columns in curves.items():
            name = f"{figure}_{run_name}" if run_name else figure
            keys = [
                key
                for key in ("update", "win_rate", "reward", "length", "kl_per_token", "perplexity")
                if key in columns
            ]
            with (Path(__file__).parent / f"{name}.csv").open("w", newline="") as file:
                table = csv.writer(file, lineterminator="\n")
                table.writerow(keys)
                digits = {"update": 0, "length": 1, "kl_per_token": 5, "perplexity": 5}
                for row in zip(*(columns[key] for key in keys), strict=True):
                    cells = zip(keys, row, strict=True)
                    table.writerow(f"{value:.{digits.get(key, 2)}f}" for key, value in cells)


def read_distributions(page: Any) -> None:  # noqa: ANN401  # pymupdf has no types
    """Figure 13: ten densities of the scores, with the axis from -10 to 30 below them."""
    shapes = [d for d in page.get_drawings() if d["type"] == "fs"]
    ticks = sorted(d["rect"].x0 for d in shapes if len(d["items"]) == 1)
    with (Path(__file__).parent / "figure13.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("update", "mean", "std", "q05", "median", "q95"))
        for update, shape in zip(
            range(100, 1001, 100), (d for d in shapes if len(d["items"]) > 1000), strict=True
        ):
            base = shape["rect"].y1
            heights = dict[float, float]()
            for x, y in ((point.x, point.y) for _, point, *_ in shape["items"]):
                heights[x] = max(heights.get(x, 0.0), base - y)
            weight = sum(heights.values())
            scores = {
                -10 + (x - ticks[0]) / (ticks[-1] - ticks[0]) * 40: heights[x] / weight
                for x in sorted(heights)
            }
            mean = sum(p * score for score, p in scores.items())
            std = sum(p * (score - mean) ** 2 for score, p in scores.items()) ** 0.5
            below = list(accumulate(scores.values()))
            cuts = [
                next(score for score, p in zip(scores, below, strict=True) if p >= share)
                for share in (0.05, 0.5, 0.95)
            ]
            table.writerow((update, *(f"{value:.2f}" for value in (mean, std, *cuts))))


if __name__ == "__main__":
    main(sys.argv[1])
