"""A forest drawn: as a tree of text, and as an SVG in which sharing is an area.

======= 197 tokens, 16 rows =======          depth runs to the right, rows run down;
|                 | 22, 8 rows | 3 |         a block is a segment: computed once, as high as
|                 |            | 4 |         the rows that share it
|                 | 21, 8 rows | 2 |
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from arctic_platform.forest.trie import Forest

Decode = Callable[[Sequence[int]], str]

ROW_GAP = 0.8
CHARACTER_WIDTH = 6.2
STYLE = """
.forest rect { fill: var(--forest-block, #3b6fd4); stroke: var(--forest-page, #ffffff); stroke-width: 0.8 }
.forest text { fill: var(--forest-ink, #ffffff); font: 11px system-ui, sans-serif }
"""


@dataclass(frozen=True)
class Block:
    """One segment on the page: its place in pixels, and how many rows share it."""

    segment: int
    x: float
    y: float
    width: float
    height: float
    num_rows: int


def count_segment_rows(forest: Forest) -> np.ndarray:
    """`[N] int64`: how many rows go through each segment."""
    segments = forest.segment_of_token[forest.row_index]
    is_first = forest.start[segments] == forest.row_index
    return np.bincount(segments[is_first], minlength=forest.num_segments)


def draw_text(forest: Forest, decode: Decode | None = None, *, max_chars: int = 40, max_lines: int = 40) -> str:
    """The forest as an indented tree, one line per segment: tokens, rows, and the beginning of its content.

    `decode` turns token ids into text; without it the ids are shown. Lines past `max_lines` are counted, not shown.
    """
    num_rows = count_segment_rows(forest)
    lines = [f"{forest.num_rows} rows, {forest.num_row_tokens} tokens; {forest.num_tokens} computed"]
    stems: list[str] = []
    for n in range(forest.num_segments):
        depth = _depth(forest, n)
        del stems[depth:]
        branch = "" if depth == 0 else "`- " if _is_last_child(forest, n) else "|- "
        size = f"{_count(forest.end[n] - forest.start[n], 'token')}, {_count(num_rows[n], 'row')}"
        head = f"{''.join(stems)}{branch}{size}"
        lines.append(f"{head}  {_content(forest, n, decode, max_chars)}")
        stems.append("" if depth == 0 else "   " if branch == "`- " else "|  ")
    hidden = len(lines) - max_lines
    return "\n".join(lines if hidden <= 0 else [*lines[:max_lines], f"... {hidden} more segments"])


def draw_svg(
    forest: Forest,
    decode: Decode | None = None,
    *,
    width: int = 900,
    row_height: float = 7.0,
    max_rows: int = 256,
) -> str:
    """The forest as one SVG element: depth to the right (square root of tokens), rows downwards.

    The darker a block, the more rows share it; hovering shows its content. Colours follow the CSS variables
    `--forest-block`, `--forest-ink` and `--forest-page`. A forest of more than `max_rows` rows is drawn thinner.
    """
    num_rows = count_segment_rows(forest)
    row_height *= min(1.0, max_rows / max(forest.num_rows, 1))
    blocks = _lay_out(forest, num_rows, width, row_height)
    height = max((block.y + block.height for block in blocks), default=0.0)
    most = math.log1p(max(num_rows, default=1))
    body = "".join(_draw_block(forest, block, decode, most) for block in blocks)
    label = f"{forest.num_row_tokens} tokens in {forest.num_rows} rows, {forest.num_tokens} computed"
    return (
        f'<svg class="forest" viewBox="0 0 {width} {height:.1f}" width="100%" role="img" '
        f'aria-label="{label}" xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{body}</svg>'
    )


def _lay_out(forest: Forest, num_rows: np.ndarray, width: float, row_height: float) -> list[Block]:
    """Children stand to the right of their parent, from its top downwards, in packed order."""
    lens = np.sqrt((forest.end - forest.start).astype(float))
    left = np.zeros(forest.num_segments)
    top = np.zeros(forest.num_segments)
    filled = np.zeros(forest.num_segments + 1)  # rows already placed under a segment; the last entry: under no segment
    for n, parent in enumerate(forest.segment_parent.tolist()):
        left[n] = left[parent] + lens[parent] if parent >= 0 else 0.0
        top[n] = (top[parent] if parent >= 0 else 0.0) + filled[parent]
        filled[parent] += num_rows[n]
    scale = width / max(float(np.max(left + lens, initial=0.0)), 1.0)
    return [
        Block(
            segment=n,
            x=left[n] * scale,
            y=top[n] * row_height,
            width=lens[n] * scale,
            height=num_rows[n] * row_height,
            num_rows=int(num_rows[n]),
        )
        for n in range(forest.num_segments)
    ]


def _draw_block(forest: Forest, block: Block, decode: Decode | None, most: float) -> str:
    num_tokens = int(forest.end[block.segment] - forest.start[block.segment])
    size = f"{_count(num_tokens, 'token')}, {_count(block.num_rows, 'row')}"
    title = html.escape(f"{size}: {_content(forest, block.segment, decode, 400)}")
    opacity = 0.35 + 0.65 * math.log1p(block.num_rows) / most
    shape = (
        f'<rect x="{block.x:.1f}" y="{block.y:.1f}" width="{block.width:.1f}" '
        f'height="{max(block.height - ROW_GAP, 0.6):.1f}" fill-opacity="{opacity:.2f}"/>'
    )
    label = _fitting_label(block, num_tokens, size)
    middle = f'x="{block.x + block.width / 2:.1f}" y="{block.y + block.height / 2:.1f}"'
    text = f'<text {middle} text-anchor="middle" dominant-baseline="central">{label}</text>' if label else ""
    return f"<g><title>{title}</title>{shape}{text}</g>"


def _fitting_label(block: Block, num_tokens: int, size: str) -> str:
    """The longest label that fits into the block, or none."""
    if block.height < 13:
        return ""
    labels = (size, f"{num_tokens} x {block.num_rows}", str(num_tokens))
    return next((label for label in labels if len(label) * CHARACTER_WIDTH < block.width), "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _content(forest: Forest, n: int, decode: Decode | None, max_chars: int) -> str:
    ids = forest.input_ids[forest.start[n] : forest.end[n]].tolist()
    text = repr(decode(ids)) if decode else " ".join(map(str, ids))
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _depth(forest: Forest, n: int) -> int:
    depth = 0
    while (n := int(forest.segment_parent[n])) >= 0:
        depth += 1
    return depth


def _is_last_child(forest: Forest, n: int) -> bool:
    parent = int(forest.segment_parent[n])
    return bool(forest.subtree_end[n] == forest.subtree_end[parent])
