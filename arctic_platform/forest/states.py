"""Recurrent states that outlive a pass: a later pass goes on from them, a forest of tokens or one token per row.

What a model's recurrent layers know behind one token of a row is one tensor per call that they make, in the order of
the calls: the last K-1 inputs `[C, K-1]` of a convolution with K taps, the state `[...]` of a scan. Those of n tokens
are stacked, `[n, ...]` per call.

    pass 1   [s s s]            -> ends: states behind s s s                 (a fork of them for every later reader)
    pass 2     [a a] [b b b]    <- initial: those states, once per root      -> ends: behind a a, behind b b b
    steps        x     y        <- StepRecurrence: one token per row, states replaced in place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from arctic_platform.forest.recurrent import Convolve, ForestRecurrence, Scan

States = Sequence[Tensor]
"""Per recurrent call of the model `[n, ...]`, for n tokens."""


@dataclass(frozen=True, eq=False)
class ResumedRecurrence(ForestRecurrence):
    """Recurrent layers over a forest whose roots go on from earlier states; serves one pass, forward only.

    initial: per call `[roots, ...]`, in the order of the forest's roots; None starts all of them from nothing.
    ends: filled by the pass, per call `[N, ...]`, the states behind the last token of every segment.
    """

    initial: States | None = None
    ends: list[Tensor] = field(default_factory=list)

    @torch.compiler.disable
    def convolve(self, conv: Convolve, x: Tensor, kernel_len: int) -> Tensor:
        """As ForestRecurrence.convolve; what lies before a root is read from its initial state."""
        before = self._begin()
        if before is None:
            before = x.new_zeros(self._num_roots, x.shape[1], kernel_len - 1)
        inputs = torch.cat([x[0], before.to(x.dtype).transpose(0, 1).flatten(1)], dim=1)
        if kernel_len not in self._windows:
            self._windows[kernel_len] = self._heads(kernel_len)
        heads, windows = self._windows[kernel_len]
        out = conv(x)
        if len(heads):
            again = conv(inputs[:, windows].transpose(0, 1))[:, :, -1]
            out = out.index_copy(2, heads, again.T.unsqueeze(0).to(out.dtype))
        last = torch.from_numpy(self._ancestors(self.forest.end - 1, kernel_len - 1, kernel_len)).to(self.device)
        self.ends.append(inputs[:, last].transpose(0, 1))
        return out

    @torch.compiler.disable
    def scan(self, scan: Scan, inputs: Sequence[Tensor]) -> Tensor:
        """As ForestRecurrence.scan; roots begin with their initial state."""
        out, states = self._scan(scan, inputs, begin=self._begin(), keep_all=True)
        self.ends.append(torch.cat(states)[self._place_of_segment])
        return out

    def _begin(self) -> Tensor | None:
        return None if self.initial is None else self.initial[len(self.ends)]

    @property
    def _num_roots(self) -> int:
        return int((self.forest.segment_parent < 0).sum())

    def _heads(self, kernel_len: int) -> tuple[Tensor, Tensor]:
        """Tokens whose window leaves their own segment, `[n]`, and their windows, `[n, kernel_len]` into the inputs."""
        forest = self.forest
        heads = np.flatnonzero(np.arange(forest.num_tokens) - forest.start[forest.segment_of_token] < kernel_len - 1)
        windows = self._ancestors(heads, kernel_len, kernel_len)
        return torch.from_numpy(heads).to(self.device), torch.from_numpy(windows).to(self.device)

    def _ancestors(self, tokens: np.ndarray, num: int, kernel_len: int) -> np.ndarray:
        """`[n, num]`: each token and the num - 1 before it, the oldest first.

        Root r's initial `kernel_len - 1` inputs stand behind the pack, from `T + r * (kernel_len - 1)` on.
        """
        forest = self.forest
        newest = forest.num_tokens + (self._root_of_token[tokens] + 1) * (kernel_len - 1) - 1
        steps = [tokens]
        for _ in range(num - 1):
            token = steps[-1]
            is_packed = token < forest.num_tokens
            before = np.where(is_packed, forest.parent[np.where(is_packed, token, 0)], token - 1)
            steps.append(np.where(before < 0, newest, before))
        return np.stack(steps[:num][::-1], axis=1) if num else np.empty((len(tokens), 0), np.int64)

    @cached_property
    def _root_of_token(self) -> np.ndarray:
        """`[T] int64`: number of the root above each token."""
        forest = self.forest
        return (np.cumsum(forest.segment_parent < 0) - 1)[forest.segment_of_token]

    @cached_property
    def _place_of_segment(self) -> Tensor:
        """`[N] int64`: where the batches of a scan leave the state of each segment."""
        taken = np.concatenate([segments for level in self._segment_levels for segments in level])
        return torch.from_numpy(np.argsort(taken)).to(self.device)


@dataclass(eq=False)
class StepRecurrence:
    """Recurrent layers over one more token per row; serves one pass.

    states: per call `[slots, ...]`, replaced in place for `slots [R] int64`, the rows of the pass.
    """

    states: States
    slots: Tensor
    num_calls: int = 0

    @torch.compiler.disable
    def convolve(self, conv: Convolve, x: Tensor, kernel_len: int) -> Tensor:
        """`conv` at the newest token of every row: `x [1, C, R]` -> `[1, C, R]`."""
        held = self._next()
        window = torch.cat([held[self.slots], x[0].T.unsqueeze(2)], dim=2)
        held[self.slots] = window[:, :, 1:]
        return conv(window)[:, :, -1].T.unsqueeze(0)

    @torch.compiler.disable
    def scan(self, scan: Scan, inputs: Sequence[Tensor]) -> Tensor:
        """`scan` over the newest token of every row: inputs `[1, R, ...]` -> outputs `[1, R, ...]`."""
        held = self._next()
        out, state = scan([x[0].unsqueeze(1) for x in inputs], held[self.slots], True)
        assert state is not None
        held[self.slots] = state.to(held.dtype)
        return out.transpose(0, 1)

    def _next(self) -> Tensor:
        self.num_calls += 1
        return self.states[self.num_calls - 1]
