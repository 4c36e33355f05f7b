"""Logits -> one token per rollout and its log-prob.

`draw_tokens` serves rows with different parameters in one call. Those that ask for nothing but a temperature share one
pass over the logits; filters, edits and reports cost something for the rows that ask for them. What is drawn may come
from edited logits, what is reported never does: a log-prob is the model's own, at the request's temperature or raw.

A rollout draws by inverse CDF from one uniform number per token, out of a counter-based generator of its own, so that
its tokens depend on the seed, its prompt and its number among the rollouts of that prompt, not on the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from arctic_platform.errors import InputError, NonFiniteError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.rules import LogitEdits, RowRules

CHUNK = 256
"""Vocabulary entries that are summed before the cumulative sum: two short searches instead of one long."""

FIRST_CANDIDATES = 256
"""Most probable tokens that top_p looks at first; eight times as many while they do not hold enough probability."""


ALL, NO_REPORT = -1, -2
"""Values of `num_top`: report the whole vocabulary, or nothing."""

NOT_FINITE = "the model's logits are not finite; check the weights of the last update"


@dataclass(frozen=True, eq=False)
class Draws:
    """`ids [R] int64` and `logprobs [R]`, fp32 (fp64 for fp64 logits).

    `top_logprobs`: for each row the log-probs of its most probable tokens and of the drawn one, None where not asked.
    """

    ids: Tensor
    logprobs: Tensor
    top_logprobs: list[dict[int, float] | None]


def row_generators(prompts: Sequence[np.ndarray], *, n: int, seed: int) -> list[np.random.Generator]:
    """One generator per rollout, prompt-major, keyed by the seed, the prompt's ids and the rollout's number.

    Where a prompt occurs twice its rollouts are numbered on, so that they differ.
    """
    occurrences: Counter[bytes] = Counter()
    generators = []
    for prompt in prompts:
        digest = hashlib.blake2b(prompt.astype("<i8").tobytes(), digest_size=16).digest()
        key = int.from_bytes(digest, "little")
        for _ in range(n):
            sequence = np.random.SeedSequence((seed, key, occurrences[digest]))
            generators.append(np.random.Generator(np.random.Philox(sequence)))
            occurrences[digest] += 1
    return generators


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How each of R rows draws; arrays, so that rows with different parameters share one call.

    `temperature`, `top_p`, `min_p [R] fp64`; `top_k [R] int64`, 0 for all; `num_top [R] int64`: tokens to report, or
    ALL or NO_REPORT; `is_raw [R] bool`: log-probs at temperature 1. `edits`: the rules of the rows `edited [A] int64`.
    `names`: of the rows, for errors. Made when rows join or leave, not in every step.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    num_top: np.ndarray
    is_raw: np.ndarray
    device: torch.device
    edits: LogitEdits | None = None
    edited: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[RowRules], device: torch.device | str = "cpu") -> RowSettings:
        """For these rollouts, in the order of the logits' rows."""
        edited = [r for r, row in enumerate(rows) if row.request.edits_logits]
        device = torch.device(device)
        return replace(
            cls._of_params([row.params for row in rows], device),
            edits=LogitEdits([rows[r] for r in edited], device) if edited else None,
            edited=np.array(edited, np.int64),
            names=tuple(row.name or f"row {r}" for r, row in enumerate(rows)),
        )

    @classmethod
    def same(cls, params: SamplingParams, num_rows: int, device: torch.device | str = "cpu") -> RowSettings:
        """The same temperature, filters and reports for every row; what needs to know the rows' tokens is left out."""
        return cls._of_params([params] * num_rows, torch.device(device))

    @classmethod
    def _of_params(cls, params: Sequence[SamplingParams], device: torch.device) -> RowSettings:
        return cls(
            temperature=np.array([p.temperature for p in params]),
            top_p=np.array([p.top_p for p in params]),
            top_k=np.array([max(p.top_k, 0) for p in params], np.int64),
            min_p=np.array([p.min_p for p in params]),
            num_top=np.array([NO_REPORT if p.logprobs is None else p.logprobs for p in params], np.int64),
            is_raw=np.array([p.logprobs_mode == "raw" for p in params]),
            device=device,
        )

    def take(self, rows: np.ndarray) -> RowSettings:
        """Those of some rows `[A] int64`, without edits."""
        columns = ("temperature", "top_p", "top_k", "min_p", "num_top", "is_raw")
        names = tuple(self.names[r] for r in rows) if self.names else ()
        return replace(
            self, **{name: getattr(self, name)[rows] for name in columns}, edits=None, edited=rows[:0], names=names
        )

    @cached_property
    def divisor(self) -> Tensor | None:
        """`[R, 1] fp64`: temperature, 1 where greedy; None where all are 1."""
        divisor = np.where(self.temperature == 0, 1.0, np.maximum(self.temperature, np.finfo(np.float32).tiny))
        return None if (divisor == 1).all() else torch.from_numpy(divisor[:, None]).to(self.device)

    @cached_property
    def edited_settings(self) -> RowSettings:
        """Those of the edited rows."""
        return self.take(self.edited)

    @cached_property
    def greedy(self) -> np.ndarray:
        """Rows at temperature 0."""
        return np.flatnonzero(self.temperature == 0)

    @cached_property
    def filtered(self) -> np.ndarray:
        """Rows that draw from a part of the vocabulary."""
        is_filtered = (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)
        return np.flatnonzero(is_filtered & (self.temperature > 0))

    @cached_property
    def reported(self) -> RowSettings:
        """Settings whose softmax is reported: at temperature 1 where log-probs are raw; itself where none is."""
        is_untempered = self.is_raw & ~np.isin(self.temperature, (0, 1))
        if not is_untempered.any():
            return self
        return replace(self, temperature=np.where(is_untempered, 1.0, self.temperature))

    def filtered_by_candidates(self, vocab_size: int) -> list[tuple[int, np.ndarray]]:
        """Filtered rows by the number of most probable tokens that they look at first: their top_k if they have one."""
        top_k = self.top_k[self.filtered]
        nums = np.minimum(np.where(top_k > 0, top_k, FIRST_CANDIDATES), vocab_size)
        return [(int(num), self.filtered[nums == num]) for num in np.unique(nums)]

    def name_of(self, row: int) -> str:
        """How errors call a row."""
        return self.names[row] if self.names else f"row {row}"


def draw_tokens(logits: Tensor, uniforms: Tensor, rows: RowSettings) -> Draws:
    """Choose one token per row of `logits [R, V]`; uniforms: `[R] fp64` in [0, 1), unused at temperature 0.

    The log-prob is that of the token under the whole softmax of `logits / temperature` (`logits` at temperature 0 and
    for rows that ask for raw ones), whatever edits and filters left to choose from; this is the trainer's definition.

    Raises:
        NonFiniteError: logits of a row have NaN, +inf, or -inf everywhere. InputError: edits left a row no token.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    own = _Softmax(logits, rows)
    own.check_finite(NonFiniteError, NOT_FINITE)
    ids = own.choose(uniforms)
    if rows.edits is not None:
        at = _index(rows.edited, rows.device)
        edited = _Softmax(rows.edits.apply(logits[at]), rows.edited_settings)
        edited.check_finite(InputError, "logit_bias, penalties, bad_words or min_tokens leave no token to draw")
        ids[at] = edited.choose(uniforms[at])
    reported = own if rows.reported is rows else _Softmax(logits, rows.reported)
    return Draws(ids, reported.logprobs(ids[:, None])[:, 0].to(logits.dtype), reported.most_probable(ids))


def report_tokens(logits: Tensor, ids: Tensor, params: SamplingParams) -> list[dict[int, float]]:
    """`prompt_logprobs` of prompt tokens `ids [P]` from `logits [P, V]` at the tokens before them; P may be 0."""
    if not len(ids):
        return []
    settings = RowSettings.same(params.model_copy(update={"logprobs": params.prompt_logprobs}), len(ids), logits.device)
    softmax = _Softmax(logits if logits.dtype == torch.float64 else logits.float(), settings.reported)
    softmax.check_finite(NonFiniteError, NOT_FINITE)
    return [report for report in softmax.most_probable(ids) if report is not None]


class _Softmax:
    """The softmax of `logits [R, V] / temperature`, row by row.

    `weights [R, chunks, CHUNK]`: `exp((logits - peak) / temperature)`, padded with zeros; `chunk_sums [R, chunks]` and
    `total [R]` in fp64. The peak is taken away before the division, so no temperature is too small.
    """

    def __init__(self, logits: Tensor, rows: RowSettings) -> None:
        self.logits = logits
        self.rows = rows
        self.peak = logits.amax(-1, keepdim=True)
        weights = logits - self.peak
        if rows.divisor is not None:
            weights.div_(rows.divisor.to(weights.dtype))
        weights = torch.exp_(weights)
        missing = -weights.shape[1] % CHUNK
        self.weights = (pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, CHUNK))
        self.chunk_sums = self.weights.sum(-1, dtype=torch.float64)
        self.total = self.chunk_sums.sum(-1)

    def check_finite(self, error: type[InputError], message: str) -> None:
        """Raise `error` for the first row that has nothing to draw from, or NaN."""
        is_finite = torch.isfinite(self.total)
        if not bool(is_finite.all()):
            row = int(is_finite.logical_not().nonzero()[0, 0])
            raise error(f"{self.rows.name_of(row)}: {message}")

    def logprobs(self, ids: Tensor) -> Tensor:
        """`[R, k] fp64`: of tokens `ids [R, k]`."""
        return self._logprobs_of(self.logits.gather(1, ids), slice(None))

    def choose(self, uniforms: Tensor) -> Tensor:
        """`[R] int64`: a token per row, by its filters."""
        rows = self.rows
        if len(rows.greedy) == len(self.logits):
            return self.logits.argmax(-1)
        ids = self._draw_any(uniforms)
        if len(rows.greedy):
            at = _index(rows.greedy, ids.device)
            ids[at] = self.logits[at].argmax(-1)
        for num, some in rows.filtered_by_candidates(self.logits.shape[1]):
            self._draw_filtered(ids, uniforms, some, num)
        return ids

    def most_probable(self, ids: Tensor) -> list[dict[int, float] | None]:
        """For each row that asks the log-probs of its most probable tokens and of `ids [R]`; None for the others."""
        num_top = np.where(self.rows.num_top == ALL, self.logits.shape[1], self.rows.num_top)
        reports: list[dict[int, float] | None] = [None] * len(num_top)
        asking = np.flatnonzero(num_top >= 0)
        if not len(asking):
            return reports
        at = _index(asking, ids.device)
        values, tokens = self.logits[at].topk(int(num_top[asking].max()), dim=-1)
        tokens = torch.cat([ids[at, None], tokens], 1)
        logprobs = self._logprobs_of(torch.cat([self.logits[at].gather(1, ids[at, None]), values], 1), at).tolist()
        for row, row_tokens, row_logprobs in zip(asking.tolist(), tokens.tolist(), logprobs, strict=True):
            num = 1 + num_top[row]
            reports[row] = dict(zip(row_tokens[:num], row_logprobs[:num], strict=True))
        return reports

    def _logprobs_of(self, values: Tensor, at: Tensor | slice) -> Tensor:
        """`[A, k] fp64`: of logits `values [A, k]` that stand in rows `at`."""
        below = values.double() - self.peak[at].double()
        if self.rows.divisor is not None:
            below = below / self.rows.divisor[at]
        return below - self.total[at, None].log()

    def _draw_any(self, uniforms: Tensor) -> Tensor:
        """Inverse CDF over the whole vocabulary: first the chunk, then the token in it."""
        chunk, rest = _search(self.chunk_sums, uniforms * self.chunk_sums.sum(-1))
        inside = self.weights[torch.arange(len(chunk), device=chunk.device), chunk].double()
        return chunk * CHUNK + _search(inside, rest)[0]

    def _draw_filtered(self, ids: Tensor, uniforms: Tensor, some: np.ndarray, num: int) -> None:
        """Draw for the rows `some` among their `num` most probable tokens, among more where these are not enough.

        Whatever the others ask, a row looks at the same candidates, so that ties between tokens fall the same way.
        """
        while len(some):
            at = _index(some, ids.device)
            values, tokens = self.logits[at].topk(num, dim=-1)
            probs, is_enough = self._filter(self._logprobs_of(values, at).exp(), some)
            place, _ = _search(probs, uniforms[at] * probs.sum(-1))
            found = tokens.gather(1, place[:, None])[:, 0]
            ids[at[is_enough]] = found[is_enough]
            some, num = some[~is_enough.cpu().numpy()], min(8 * num, self.logits.shape[1])

    def _filter(self, probs: Tensor, some: np.ndarray) -> tuple[Tensor, Tensor]:
        """min_p, then the fewest tokens that hold top_p of what is left; whether the candidates were enough, `[A]`.

        `probs [A, num]`, descending, all of the row's top_k where it has one.
        """
        columns = np.stack([self.rows.top_p[some], self.rows.min_p[some], self.rows.top_k[some]])
        top_p, min_p, top_k = torch.from_numpy(columns).to(probs.device)[:, :, None]
        probs = probs * (probs >= min_p * probs[:, :1])
        is_whole = (top_k > 0) | (probs[:, -1:] == 0) | (probs.shape[1] == self.logits.shape[1])
        held = probs.sum(-1, keepdim=True)
        limit = top_p * torch.where(is_whole, held, 1.0)
        is_enough = is_whole | ((min_p == 0) & (held >= top_p))
        before = probs.cumsum(-1) - probs
        return probs * (before < limit), is_enough[:, 0]


def _search(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative weight exceeds target, and how far target reaches into it.

    `weights [R, C] fp64`, `target [R] fp64`. A place without weight is never chosen, whatever was rounded.
    """
    cumulative = weights.cumsum(-1)
    below_end = torch.nextafter(cumulative[:, -1], torch.zeros_like(target))
    target = torch.minimum(target, below_end)
    place = torch.searchsorted(cumulative, target[:, None], right=True)
    before = cumulative.gather(1, place) - weights.gather(1, place)
    return place[:, 0], (target - before[:, 0]).clamp_min_(0)


def _index(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).to(device)
