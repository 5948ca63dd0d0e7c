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
            tuple(round(getattr(drawing["rect"], end), 1) for end in ("x0", "x1", "y0", "y1"))
            for drawing in drawings
            if len(drawing["items"]) == 1
            and drawing["color"] == (0, 0, 0)
            and drawing["rect"].y0 == drawing["rect"].y1
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
        words = [(*word[:4], number(word[4])) for word in page.get_text("words")]
        curves: dict[str, dict[str, list[float]]] = {}
        for panel, (y0, y1, x0, x1) in zip(panels, boxes, strict=True):
            left = [
                ((word_y0 + word_y1) / 2, tick)
                for _, word_y0, word_x1, word_y1, tick in words
                if tick is not None
                and x0 - 14 < word_x1 < x0 + 1
                and y0 - 3 < (word_y0 + word_y1) / 2 < y1 + 3
            ]
            below = [
                ((word_x0 + word_x1) / 2, tick)
                for word_x0, word_y0, word_x1, _, tick in words
                if tick is not None
                and y1 - 1 < word_y0 < y1 + 8
                and x0 - 4 < (word_x0 + word_x1) / 2 < x1 + 4
            ]
            # signs are missing: the two highest labels of an axis are positive everywhere
            (upper_y, upper_tick), (lower_y, lower_tick) = sorted(left)[:2]
            first_x, first_update = sorted(below)[0]
            last_x, last_update = sorted(below)[-1]
            for drawing in drawings:
                rect = drawing["rect"]
                items = drawing["items"]
                inside = x0 <= rect.x0 and rect.x1 <= x1 and y0 <= rect.y0 and rect.y1 <= y1
                if panel == "-" or drawing["type"] != "s" or len(items) < 70 or not inside:
                    continue
                color = "".join(f"{round(part * 255):02x}" for part in drawing["color"])
                points = [items[0][1], *(item[2] for item in items)]
                run = curves.setdefault(runs[COLORS[color]], {})
                run["update"] = [
                    first_update
                    + (point.x - first_x) / (last_x - first_x) * (last_update - first_update)
                    for point in points
                ]
                run[panel] = [
                    upper_tick
                    + (point.y - upper_y) / (lower_y - upper_y) * (lower_tick - upper_tick)
                    for point in points
                ]
            if figure == "figure4" and panel == "reward":
                # the win rate: a red line of eleven points, with an axis at the right
                (upper_y, upper_tick), (lower_y, lower_tick) = sorted(
                    ((word_y0 + word_y1) / 2, tick)
                    for word_x0, word_y0, _, word_y1, tick in words
                    if tick is not None
                    and x1 < word_x0 < x1 + 12
                    and y0 - 3 < (word_y0 + word_y1) / 2 < y1 + 3
                )[:2]
                (line,) = (
                    drawing["items"]
                    for drawing in drawings
                    if drawing["type"] == "s"
                    and drawing["color"] == (1, 0, 0)
                    and len(drawing["items"]) == 10
                )
                points = [line[0][1], *(item[2] for item in line)]
                updates = [
                    first_update
                    + (point.x - first_x) / (last_x - first_x) * (last_update - first_update)
                    for point in points
                ]
                rates = [
                    upper_tick
                    + (point.y - upper_y) / (lower_y - upper_y) * (lower_tick - upper_tick)
                    for point in points
                ]
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
    shapes = [drawing for drawing in page.get_drawings() if drawing["type"] == "fs"]
    ticks = sorted(shape["rect"].x0 for shape in shapes if len(shape["items"]) == 1)
    with (Path(__file__).parent / "figure13.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("update", "mean", "std", "q05", "median", "q95"))
        for update, shape in zip(
            range(100, 1001, 100),
            (shape for shape in shapes if len(shape["items"]) > 1000),
            strict=True,
        ):
            base = shape["rect"].y1
            heights = dict[float, float]()
            for x, y in ((point.x, point.y) for _, point, *_ in shape["items"]):
                heights[x] = max(heights.get(x, 0.0), base - y)
            total = sum(heights.values())
            scores = {
                -10 + (x - ticks[0]) / (ticks[-1] - ticks[0]) * 40: heights[x] / total
                for x in sorted(heights)
            }
            mean = sum(weight * score for score, weight in scores.items())
            std = sum(weight * (score - mean) ** 2 for score, weight in scores.items()) ** 0.5
            below = list(accumulate(scores.values()))
            cuts = [
                next(score for score, part in zip(scores, below, strict=True) if part >= share)
                for share in (0.05, 0.5, 0.95)
            ]
            table.writerow((update, *(f"{value:.2f}" for value in (mean, std, *cuts))))


if __name__ == "__main__":
    main(sys.argv[1])
