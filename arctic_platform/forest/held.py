"""A prefix that is computed once and read by several passes: its keys and values are held, per layer.

A batch whose forest exceeds the budget runs in stages, depth-first. A held run is a piece of one row's path; a pass
under it computes only what lies behind:

    pass 0   s s s s s s              keys, values, last hidden states held
    pass 1             | a a x        reads the 6 held tokens by one rectangle more that is not causal
    pass 2             | b b y        the same; both add their gradients to the held tensors
    pass 0, backward                  once, with the collected gradients

Held tensors are detached leaves, so the backward of a pass ends there. Recomputation (gradient checkpointing without
reentrance) meets a sealed run and leaves it alone: nothing is collected twice.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from arctic_platform.errors import ConfigError, UnsupportedModelError
from arctic_platform.forest.attention import ForestPlan, attend_rectangles
from arctic_platform.forest.kernels import acc_dtype
from arctic_platform.forest.recurrent import ForestRecurrence
from arctic_platform.forest.trie import Forest


class HeldTensor:
    """A detached leaf `value` of `source`, and the gradients that passes have sent to it, summed in fp32 or fp64."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.value = source.detach()
        self.gradient: Tensor | None = None
        if source.requires_grad:
            self.value.requires_grad_()
            self.value.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, value: Tensor) -> None:
        assert value.grad is not None
        arrived = value.grad.to(acc_dtype(value.dtype))
        self.gradient = arrived if self.gradient is None else self.gradient.add_(arrived)
        value.grad = None


class HeldRun:
    """The tokens at positions `[start, end)` of one path.

    Filled by the pass that computes them, then sealed; `backward` sends the collected gradients through that pass.
    """

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._layers: dict[int, tuple[HeldTensor, HeldTensor]] = {}
        self._hidden: HeldTensor | None = None
        self._needs_graph = torch.is_grad_enabled()

    def keep(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Hold one layer's `k [1, K, L, D]` and `v [1, K, L, Dv]`; nothing once the run is sealed.

        Raises ConfigError under reentrant checkpointing, whose forward has no graph to send gradients through, and
        UnsupportedModelError for a model that attends twice in one layer.
        """
        if self._hidden is not None:
            return
        if self._needs_graph and not torch.is_grad_enabled():
            raise ConfigError(
                "a held prefix needs its graph, and gradient checkpointing with use_reentrant=True computes it without "
                "one; call model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
        if layer_idx in self._layers:
            raise UnsupportedModelError(f"layer {layer_idx} attends twice in one pass, so its keys cannot be held")
        self._layers[layer_idx] = (HeldTensor(k), HeldTensor(v))

    def seal(self, hidden: Tensor) -> None:
        """Hold the last hidden states `[L, E]`; the pass is complete."""
        self._hidden = HeldTensor(hidden)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The leaves k and v of one layer. Raises UnsupportedModelError where the run's own pass had none."""
        if layer_idx not in self._layers:
            raise UnsupportedModelError(f"layer {layer_idx} did not attend when the prefix was computed")
        k, v = self._layers[layer_idx]
        return k.value, v.value

    @property
    def hidden(self) -> Tensor:
        """The leaf `[L, E]` of last hidden states."""
        assert self._hidden is not None, "a run is read after its own pass"
        return self._hidden.value

    def backward(self) -> None:
        """Send what was collected through the pass that computed the run. Nothing where nothing was collected."""
        assert self._hidden is not None, "a run is read after its own pass"
        tensors = [self._hidden, *(x for pair in self._layers.values() for x in pair)]
        reached = [(x.source, x.gradient.to(x.source.dtype)) for x in tensors if x.gradient is not None]
        self._layers.clear()
        if reached:
            sources, gradients = zip(*reached, strict=True)
            torch.autograd.backward(sources, gradients)


@dataclass
class HeldPath:
    """Held runs from the root downwards, end to end: the tokens that the next pass need not compute."""

    runs: list[HeldRun] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens on the path."""
        return self.runs[-1].end if self.runs else 0

    @contextmanager
    def holding(self, end: int) -> Generator[HeldRun]:
        """A new run from the end of the path to `end`; it joins the path when its pass is done."""
        run = HeldRun(self.num_tokens, end)
        yield run
        self.runs.append(run)

    def release(self) -> None:
        """Take the deepest run off the path, and run its backward."""
        self.runs.pop().backward()

    def hidden_at(self, positions: np.ndarray) -> list[Tensor]:
        """Last hidden states at ascending positions below `num_tokens`, one `[u, E]` for each run."""
        inside = [positions[(positions >= run.start) & (positions < run.end)] - run.start for run in self.runs]
        return [
            run.hidden[torch.from_numpy(at).to(run.hidden.device)] for run, at in zip(self.runs, inside, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class HeldPlan(ForestPlan):
    """The part of a forest behind held runs. `forest` is `tail_of(whole forest, tokens of the runs)`.

    above: the runs, from the root downwards. keeps: the run that this very pass computes, None where nobody reads it.
    """

    above: tuple[HeldRun, ...] = ()
    keeps: HeldRun | None = None

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the tail to itself and to the held path; see AttendPlan."""
        if self.keeps is not None:
            self.keeps.keep(layer_idx, k, v)
        rule = self.rule(q, v, scale=scale, sliding_window=sliding_window, softcap=softcap)
        held = [run.layer(layer_idx) for run in self.above]
        return attend_rectangles(q, k, v, sinks, self, rule, held)

    @property
    def recurrence(self) -> ForestRecurrence:
        """Raises UnsupportedModelError: a recurrent state cannot be read off keys and values."""
        raise UnsupportedModelError("a layer that keeps a recurrent state cannot go on from held keys and values")

    def held_mask(self, n: int, sliding_window: int | None) -> Tensor | None:
        """`[T, L] bool`: the keys of the n-th run above within the window of each query; None where all are."""
        run = self.above[n]
        position = self.position_ids[0]
        if not sliding_window or int(position.max()) - run.start < sliding_window:
            return None
        keys = torch.arange(run.start, run.end, device=position.device)
        return position[:, None] - keys[None, :] < sliding_window


def common_prefix_len(forest: Forest) -> int:
    """Tokens that all rows begin with, as the forest stores them: its root segment, where there is one root only."""
    is_one_tree = forest.num_segments > 0 and int(forest.subtree_end[0]) == forest.num_tokens
    return int(forest.end[0]) if is_one_tree and (forest.row_lens > 0).all() else 0


def tail_of(forest: Forest, num_held: int) -> Forest:
    """The packed tokens behind the first `num_held`, which all rows begin with; positions stay those of the rows."""
    assert num_held <= common_prefix_len(forest), "only a prefix of every row can be held"
    if not num_held:
        return forest
    lives = forest.end > num_held
    num_gone = int((~lives).sum())
    parents = forest.parent[num_held:] - num_held
    return replace(
        forest,
        input_ids=forest.input_ids[num_held:],
        position_ids=forest.position_ids[num_held:],
        parent=np.where(parents < 0, -1, parents),
        start=np.maximum(forest.start[lives] - num_held, 0),
        end=forest.end[lives] - num_held,
        subtree_end=forest.subtree_end[lives] - num_held,
        segment_parent=np.maximum(forest.segment_parent[lives] - num_gone, -1),
        row_index=forest.row_index[forest.row_index >= num_held] - num_held,
        row_offsets=forest.row_offsets - num_held * np.arange(forest.num_rows + 1),
    )
