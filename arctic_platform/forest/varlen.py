"""Forest attention for variable-length flash kernels: one causal call, and one call per level of the forest.

Segments tile the pack, so their own squares are one causal call over all of them. What descendants see of a segment is
a rectangle that is not causal; the rectangles of one level have no token in common, so they are one call as well, on
gathered queries and keys:

      keys  s s s  a a  x  y
    s       1                     causal: 3 x 3, 2 x 2, 1 x 1, 1 x 1
    s       1 1
    s       1 1 1
    a       0 0 0  1              level 0: queries a a x y against keys s s s
    a       0 0 0  1 1
    x       0 0 0  2 2  1         level 1: queries x y against keys a a (marked 2)
    y       0 0 0  2 2     1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest.attention import ForestPlan, Rule
from arctic_platform.forest.kernels import VARLEN, Spans, Varlen, acc_dtype, merge_


@dataclass(frozen=True, eq=False)
class Level:
    """The rectangles of the segments of one depth: packed queries, packed keys, and where each rectangle's lie."""

    queries: Tensor
    keys: Tensor
    at_q: Spans
    at_k: Spans


@dataclass(frozen=True, eq=False)
class VarlenPlan(ForestPlan):
    """A forest laid out for variable-length kernels.

    Windows that a branch could see past and soft-caps are not for these kernels; such layers run by rectangles.
    """

    varlen: Varlen = VARLEN
    implementation = "flash_attention_2"

    @cached_property
    def squares(self) -> Spans:
        """Where each segment lies."""
        bounds = np.append(self.forest.start, self.forest.num_tokens)
        return self._spans(np.diff(bounds))

    @cached_property
    def levels(self) -> list[Level]:
        """Levels with descendants, from the roots downwards."""
        forest = self.forest
        depth = np.zeros(forest.num_segments, np.int64)
        for n, above in enumerate(forest.segment_parent.tolist()):
            depth[n] = depth[above] + 1 if above >= 0 else 0
        at_depth = [np.flatnonzero(~forest.is_leaf & (depth == d)) for d in range(depth.max(initial=-1) + 1)]
        return [self._level(segments) for segments in at_depth if len(segments)]

    def _level(self, segments: np.ndarray) -> Level:
        forest = self.forest
        queries = np.concatenate([np.arange(forest.end[n], forest.subtree_end[n]) for n in segments])
        keys = np.concatenate([np.arange(forest.start[n], forest.end[n]) for n in segments])
        return Level(
            queries=torch.from_numpy(queries).to(self.device),
            keys=torch.from_numpy(keys).to(self.device),
            at_q=self._spans((forest.subtree_end - forest.end)[segments]),
            at_k=self._spans((forest.end - forest.start)[segments]),
        )

    def _spans(self, lens: np.ndarray) -> Spans:
        offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return Spans(torch.from_numpy(offsets).to(self.device), int(lens.max(initial=0)))

    def serves(self, rule: Rule) -> bool:
        """Whether the kernels can do what a layer asks for."""
        longest = int(self.forest.position_ids.max(initial=0)) + 1
        has_window = rule.sliding_window is not None and rule.sliding_window < longest
        return rule.kernel == "flash" and not (has_window and self.levels)

    def run(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """See ForestPlan."""
        if not self.serves(rule):
            return super().run(q, k, v, rule)
        q, k, v = (_by_token(x) for x in (q, k, v))
        squares = {"scale": rule.scale, "causal": True, "window": rule.sliding_window}
        out, lse = self.varlen.forward(q, k, v, self.squares, self.squares, **squares)
        out, lse = out.to(acc_dtype(q.dtype)), lse.mT.contiguous()
        for level in self.levels:
            part_out, part_lse = self.varlen.forward(
                q[level.queries], k[level.keys], v[level.keys], level.at_q, level.at_k, scale=rule.scale, causal=False
            )
            out_seen, lse_seen = out[level.queries], lse[level.queries]
            merge_(out_seen, lse_seen, part_out, part_lse.mT)
            out[level.queries], lse[level.queries] = out_seen, lse_seen
        return _by_head(out).contiguous(), lse.mT.unsqueeze(0).contiguous()

    def differentiate(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ForestPlan."""
        if not self.serves(rule):
            return super().differentiate(do, q, k, v, out, lse, rule)
        do, q, k, v, out = (_by_token(x) for x in (do, q, k, v, out))
        lse = lse[0].contiguous()
        squares = {"scale": rule.scale, "causal": True, "window": rule.sliding_window}
        own = self.varlen.backward(do, q, k, v, out, lse, self.squares, self.squares, **squares)
        d_q, d_k, d_v = (x.to(lse.dtype) for x in own)
        for level in self.levels:
            rows = (x[level.queries] for x in (do, q))
            pair = (x[level.keys] for x in (k, v))
            merged = (out[level.queries], lse[:, level.queries].contiguous())
            parts = self.varlen.backward(*rows, *pair, *merged, level.at_q, level.at_k, scale=rule.scale, causal=False)
            for total, part, where in zip((d_q, d_k, d_v), parts, (level.queries, level.keys, level.keys), strict=True):
                total[where] += part
        return _by_head(d_q), _by_head(d_k), _by_head(d_v)


def _by_token(x: Tensor) -> Tensor:
    """`[1, H, T, D]` -> `[T, H, D]`."""
    return x[0].transpose(0, 1).contiguous()


def _by_head(x: Tensor) -> Tensor:
    """`[T, H, D]` -> `[1, H, T, D]`."""
    return x.transpose(0, 1).unsqueeze(0)
