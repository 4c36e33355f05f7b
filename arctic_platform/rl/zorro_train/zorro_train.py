"""Prompt deduplication of a padded batch, as plain tensor functions that need no model.

    rows (B = 3)                        packed (T' tokens, one row)
      r0  [pad][prompt a][resp 0][pad]    prompt a | resp 0 | resp 2 | prompt b | resp 1
      r1  [pad][prompt b][resp 1][pad]
      r2  [pad][prompt a][resp 2][pad]    groups [[0, 2], [1]], in the order in which they are first seen

A *padded* pack keeps the pad columns of prompts and responses, an *unpadded* one drops every position whose
mask is 0. Sharing is decided by the live prompt tokens, the mask and the positions, never by pad ids: a real
token that equals the pad id is a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arctic_platform.errors import InputError


class ReconstructionInfo(dict):
    """What `create_deduplicated_batch` hands to the functions that go back and forth between pack and rows.

    Keys:
        prompt_groups: list[list[int]], the rows that share a prompt, in the order in which they were packed.
        prompt_len, response_length: int, padded lengths P and R.
        segment_info: list of dicts `start`, `end` (packed range), `original_idx` (row; of a prompt the first row
            of its group), `type` ("prompt" or "response"), `group_idx`.
        original_batch_size, original_seq_len: int, B and S.
        is_unpadded: bool, whether positions with mask 0 were dropped.
        cu_seqlens_response: [B + 1] int32, bounds of the live response tokens of each row, in packed order.
        cu_seqlens_packed: [B + 1] int32, unpadded only: bounds of the rows in what `reconstruct_sequences` returns.
        rows_to_pack: [B, S] or [1, sum of row lengths] int64, packed position of every reconstructed token.
        pack_to_rows: [T'] int64, for every packed position one flat index into the reconstruction.
        live_index, live_offsets: packed positions of the live tokens of each row in row order, and their [B + 1]
            bounds; live_prompt_lens: [B] int64.
    """


@dataclass(frozen=True)
class _Rows:
    """A checked batch: ids, positions and mask [B, S], prompt columns first."""

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    prompt_len: int

    @property
    def response_len(self) -> int:
        return self.input_ids.shape[1] - self.prompt_len

    @property
    def prompt_key(self) -> Tensor:
        """[B, 2P] int64: mask and live positions of the prompt columns."""
        mask = self.mask[:, : self.prompt_len]
        positions = self.position_ids[:, : self.prompt_len]
        return torch.cat([mask.long(), positions.masked_fill(~mask, 0)], dim=1)

    @property
    def live_prompts(self) -> Tensor:
        """[B, P] int64: prompt ids, 0 where the mask hides them."""
        return self.input_ids[:, : self.prompt_len].masked_fill(~self.mask[:, : self.prompt_len], 0)


class ZoRRoTrain:
    """The documented static functions; every one is differentiable where its input is a float tensor."""

    @staticmethod
    def find_prompt_groups(
        input_ids: Tensor, response_length: int, *, attention_mask: Tensor | None = None
    ) -> tuple[list[list[int]], Tensor]:
        """Find the rows whose prompts are equal.

        Args:
            input_ids: [B, S] integer, the last `response_length` columns are the response region.
            response_length: R, 1 <= R < S.
            attention_mask: [B, S], 0 at padding. With it, padded positions are not compared and a pad id that is a
                real token elsewhere does not make two prompts equal.

        Returns:
            Groups of row indices in first-seen order (rows ascending) and the [G, P] prompt columns of each
            group's first row.

        Raises:
            InputError: a shape, dtype or length does not fit.
        """
        prompt_len = _check_ids(input_ids, response_length)
        mask = _check_mask(attention_mask, input_ids)[:, :prompt_len]
        prompts = input_ids[:, :prompt_len]
        groups = _group_equal(torch.cat([mask.long(), prompts.masked_fill(~mask, 0).long()], dim=1))
        return groups, prompts[[group[0] for group in groups]]

    @staticmethod
    def create_deduplicated_batch(
        input_ids: Tensor,
        position_ids: Tensor | None,
        response_length: int,
        prompt_groups: Sequence[Sequence[int]],
        unique_prompts: Tensor,
        attention_mask: Tensor | None = None,
        use_unpad: bool = False,
    ) -> tuple[Tensor, Tensor, ReconstructionInfo]:
        """Pack each group's prompt once, followed by the group's responses.

        Rows of one group whose masks or positions differ in the prompt columns do not share: the group is split,
        and `prompt_groups` of the returned info says how.

        Args:
            input_ids: [B, S] integer rows `[left pad][prompt][response][right pad]`.
            position_ids: [B, S] integer, or None to count live tokens from 0.
            response_length: R, 1 <= R < S.
            prompt_groups, unique_prompts: what `find_prompt_groups` returned for these rows.
            attention_mask: [B, S], 0 at padding; None means that every position is live.
            use_unpad: drop the positions whose mask is 0.

        Returns:
            ids [1, T'], positions [1, T'], and the info that the inverse functions read.

        Raises:
            InputError: shapes do not fit, the groups are not a partition of the rows, or rows of a group hold
                different prompts.
        """
        prompt_len = _check_ids(input_ids, response_length)
        mask = _check_mask(attention_mask, input_ids)
        rows = _Rows(input_ids, _check_positions(position_ids, mask), mask, prompt_len)
        groups = _split_groups(rows, _check_groups(prompt_groups, len(input_ids)))
        _check_prompts(rows, groups, prompt_groups, unique_prompts)
        info = _lay_out(rows, groups, use_unpad)
        source = _pack_sources(rows, info)
        return input_ids.flatten()[source][None], rows.position_ids.flatten()[source][None], info

    @staticmethod
    def reconstruct_sequences(dedup_hidden: Tensor, reconstruction_info: Mapping[str, Any]) -> Tensor:
        """Give every row its prompt back.

        Args:
            dedup_hidden: [1, T', ...], one value per packed position.

        Returns:
            [B, S, ...] for a padded pack, [1, sum of row lengths, ...] in row order (bounds `cu_seqlens_packed`)
            for an unpadded one.
        """
        index = reconstruction_info["rows_to_pack"]
        _check_values("dedup_hidden", dedup_hidden, (1, len(reconstruction_info["pack_to_rows"])))
        flat = dedup_hidden[0].index_select(0, index.flatten().to(dedup_hidden.device))
        return flat.unflatten(0, tuple(index.shape))

    @staticmethod
    def deduplicate_sequences(full_hidden: Tensor, reconstruction_info: Mapping[str, Any]) -> Tensor:
        """Inverse of `reconstruct_sequences`; a shared prompt is read from the first row that has it.

        Args:
            full_hidden: [B, S, ...] (padded pack) or [1, sum of row lengths, ...] (unpadded pack).

        Returns:
            [1, T', ...]
        """
        _check_values("full_hidden", full_hidden, tuple(reconstruction_info["rows_to_pack"].shape))
        index = reconstruction_info["pack_to_rows"].to(full_hidden.device)
        return full_hidden.flatten(0, 1).index_select(0, index)[None]

    @staticmethod
    def extract_unpadded_responses_from_deduped_packed_ids(
        packed: Tensor, reconstruction_info: Mapping[str, Any], offset: int = 0
    ) -> Tensor:
        """Read the live response tokens of every row, in packed (group) order.

        Args:
            packed: [T', ...], one value per packed position.
            offset: how far along *its own row* each token is shifted before reading. With -1 the first response
                token reads the last prompt token, which all rows of the group share, and so on: these are the
                positions that predict the response.

        Returns:
            [sum of response lengths, ...], bounds `cu_seqlens_response`.

        Raises:
            InputError: the shift leaves a row.
        """
        _check_values("packed", packed, (len(reconstruction_info["pack_to_rows"]),))
        index = _response_index(reconstruction_info, int(offset))
        return packed.index_select(0, index.to(packed.device))

    @staticmethod
    def responses_in_orig_sample_order(packed_responses: Tensor, reconstruction_info: Mapping[str, Any]) -> Tensor:
        """Undo the permutation by prompt groups. Reads `prompt_groups` and `cu_seqlens_response` only.

        Args:
            packed_responses: [sum of response lengths, ...] in packed order.

        Returns:
            The same values in the order of the caller's rows; the input itself when that is the order already.
        """
        order = [row for group in reconstruction_info["prompt_groups"] for row in group]
        bounds = torch.as_tensor(reconstruction_info["cu_seqlens_response"], device="cpu").long()
        _check_values("packed_responses", packed_responses, (int(bounds[-1]),))
        if order == sorted(order):
            return packed_responses
        slot_of_row = torch.tensor(order).argsort()
        index = _ranges(bounds[:-1][slot_of_row], bounds.diff()[slot_of_row])
        return packed_responses.index_select(0, index.to(packed_responses.device))


def _check_ids(input_ids: Tensor, response_length: int) -> int:
    if input_ids.dim() != 2 or input_ids.dtype.is_floating_point or input_ids.dtype.is_complex:
        raise InputError(
            f"input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}; pass integer ids of shape [B, S]"
        )
    if not 1 <= response_length < input_ids.shape[1] or len(input_ids) == 0:
        raise InputError(
            f"response_length={response_length} does not fit input_ids of shape {tuple(input_ids.shape)}; "
            "pass at least one row, one response column and one prompt column"
        )
    if (input_ids < 0).any():
        raise InputError(f"input_ids holds {int(input_ids.min())}; ids are 0 or more, the mask says what is padding")
    return input_ids.shape[1] - response_length


def _check_mask(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; "
            "pass one 0 or 1 per token"
        )
    mask = attention_mask.to(input_ids.device)
    if not ((mask == 0) | (mask == 1)).all():
        raise InputError("attention_mask holds values other than 0 and 1; pass 1 for live tokens and 0 for padding")
    return mask.bool()


def _check_positions(position_ids: Tensor | None, mask: Tensor) -> Tensor:
    if position_ids is None:
        return (mask.long().cumsum(1) - 1).clamp(min=0)
    if position_ids.shape != mask.shape:
        raise InputError(
            f"position_ids has shape {tuple(position_ids.shape)}, input_ids {tuple(mask.shape)}; pass one position "
            "per token (several position axes, as in M-RoPE, are not supported here)"
        )
    return position_ids.to(mask.device).long()


def _check_groups(prompt_groups: Sequence[Sequence[int]], num_rows: int) -> list[list[int]]:
    groups = [[int(row) for row in group] for group in prompt_groups]
    if sorted(row for group in groups for row in group) != list(range(num_rows)) or not all(groups):
        raise InputError(
            f"prompt_groups={groups} does not hold each of the {num_rows} rows once; "
            "pass what find_prompt_groups returned for this batch"
        )
    return groups


def _check_prompts(
    rows: _Rows, groups: list[list[int]], given: Sequence[Sequence[int]], unique_prompts: Tensor
) -> None:
    if tuple(unique_prompts.shape) != (len(given), rows.prompt_len):
        raise InputError(
            f"unique_prompts has shape {tuple(unique_prompts.shape)}; {len(given)} groups of {rows.prompt_len} prompt "
            "columns need one row per group, as find_prompt_groups returns them"
        )
    live = rows.live_prompts
    for members in (groups, given):
        order, first = _flat_and_first(members, live.device)
        _require_equal(live[order], live[first], order, "the first row of its group")
        if members is given:
            mask = rows.mask[order, : rows.prompt_len]
            counts = torch.tensor([len(group) for group in given], device=live.device)
            wanted = unique_prompts.to(live.device).repeat_interleave(counts, dim=0).masked_fill(~mask, 0)
            _require_equal(live[order], wanted, order, "its row of unique_prompts")


def _flat_and_first(groups: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    order = torch.tensor([row for group in groups for row in group], device=device)
    first = torch.tensor([group[0] for group in groups for _ in group], device=device)
    return order, first


def _require_equal(prompts: Tensor, wanted: Tensor, order: Tensor, what: str) -> None:
    differs = (prompts != wanted).any(dim=1)
    if differs.any():
        row = int(order[differs][0])
        raise InputError(
            f"the prompt of row {row} differs from {what}; rows of one group must hold the same prompt tokens, "
            "as find_prompt_groups returns them"
        )


def _check_values(name: str, values: Tensor, leading: tuple[int, ...]) -> None:
    if tuple(values.shape[: len(leading)]) != leading:
        raise InputError(
            f"{name} has shape {tuple(values.shape)}; its leading sizes must be {list(leading)} "
            "to match this reconstruction_info"
        )


def _group_equal(keys: Tensor) -> list[list[int]]:
    """Indices of equal rows of keys [B, C], groups in first-seen order and members ascending."""
    _, inverse = torch.unique(keys, dim=0, return_inverse=True)
    first_seen: dict[int, list[int]] = {}
    for index, label in enumerate(inverse.tolist()):
        first_seen.setdefault(label, []).append(index)
    return list(first_seen.values())


def _split_groups(rows: _Rows, groups: list[list[int]]) -> list[list[int]]:
    """Split groups whose rows disagree in prompt mask or prompt positions; order of groups and rows is kept."""
    order = [row for group in groups for row in group]
    label = torch.tensor([index for index, group in enumerate(groups) for _ in group], device=rows.mask.device)
    keys = torch.cat([label[:, None], rows.prompt_key[order]], dim=1)
    return [[order[index] for index in members] for members in _group_equal(keys)]


def _lay_out(rows: _Rows, groups: list[list[int]], use_unpad: bool) -> ReconstructionInfo:
    """Place every segment in the pack and write down both directions of the mapping."""
    num_rows, seq_len = rows.input_ids.shape
    device = rows.input_ids.device
    stored = rows.mask if use_unpad else torch.ones_like(rows.mask)
    prompt_sizes = stored[:, : rows.prompt_len].sum(1).tolist()
    response_sizes = stored[:, rows.prompt_len :].sum(1).tolist()
    segments = _segments(groups, prompt_sizes, response_sizes)
    rows_to_pack = _row_positions(segments, groups, stored, rows.prompt_len)

    live_lens = rows.mask.sum(1)
    live_responses = rows.mask[:, rows.prompt_len :].sum(1)
    order = [row for group in groups for row in group]
    reconstructed = rows_to_pack[stored]
    num_packed = segments[-1]["end"]
    info = ReconstructionInfo(
        prompt_groups=groups,
        prompt_len=rows.prompt_len,
        response_length=rows.response_len,
        segment_info=segments,
        original_batch_size=num_rows,
        original_seq_len=seq_len,
        is_unpadded=use_unpad,
        cu_seqlens_response=_bounds(live_responses[order]).int(),
        rows_to_pack=reconstructed[None] if use_unpad else rows_to_pack,
        pack_to_rows=_first_occurrence(reconstructed, num_packed),
        live_index=rows_to_pack[rows.mask],
        live_offsets=_bounds(live_lens),
        live_prompt_lens=(live_lens - live_responses).to(device),
    )
    if use_unpad:
        info["cu_seqlens_packed"] = _bounds(live_lens).int()
    return info


def _segments(groups: list[list[int]], prompt_sizes: list[int], response_sizes: list[int]) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = []
    end = 0
    for group_idx, group in enumerate(groups):
        parts = [("prompt", group[0], prompt_sizes[group[0]])]
        parts += [("response", row, response_sizes[row]) for row in group]
        for kind, row, size in parts:
            start, end = end, end + size
            segments.append({"start": start, "end": end, "original_idx": row, "type": kind, "group_idx": group_idx})
    return segments


def _row_positions(segments: list[dict[str, Any]], groups: list[list[int]], stored: Tensor, prompt_len: int) -> Tensor:
    """[B, S] int64: packed position of each stored token (meaningless where `stored` is False)."""
    prompt_start = torch.zeros(len(stored), dtype=torch.long)
    response_start = torch.zeros(len(stored), dtype=torch.long)
    for segment in segments:
        if segment["type"] == "prompt":
            prompt_start[groups[segment["group_idx"]]] = segment["start"]
        else:
            response_start[segment["original_idx"]] = segment["start"]
    prompt, response = stored[:, :prompt_len], stored[:, prompt_len:]
    return torch.cat(
        [
            prompt.long().cumsum(1) - 1 + prompt_start[:, None].to(stored.device),
            response.long().cumsum(1) - 1 + response_start[:, None].to(stored.device),
        ],
        dim=1,
    )


def _pack_sources(rows: _Rows, info: ReconstructionInfo) -> Tensor:
    """[T'] flat index into the caller's [B, S] tensors for every packed position."""
    if not info["is_unpadded"]:
        return info["pack_to_rows"]
    return rows.mask.flatten().nonzero()[:, 0][info["pack_to_rows"]]


def _first_occurrence(index: Tensor, size: int) -> Tensor:
    """For each value below size, the first place where `index` (flattened) holds it."""
    flat = index.flatten()
    places = torch.arange(len(flat), device=flat.device)
    return torch.full((size,), len(flat), device=flat.device).scatter_reduce(0, flat, places, "amin")


def _response_index(info: Mapping[str, Any], offset: int) -> Tensor:
    order = torch.tensor([row for group in info["prompt_groups"] for row in group])
    offsets, prompt_lens = info["live_offsets"].cpu(), info["live_prompt_lens"].cpu()
    begin = offsets[:-1] + prompt_lens
    lens = offsets[1:] - begin
    leaves = (lens > 0) & ((prompt_lens + offset < 0) | (offset > 0))
    if leaves.any():
        row = int(leaves.nonzero()[0, 0])
        raise InputError(
            f"offset={offset} leaves row {row}, which has {int(prompt_lens[row])} prompt tokens; "
            f"pass an offset from -{int(prompt_lens[lens > 0].min())} to 0"
        )
    places = _ranges((begin + offset)[order], lens[order])
    return info["live_index"].index_select(0, places.to(info["live_index"].device))


def _ranges(starts: Tensor, lens: Tensor) -> Tensor:
    """Concatenation of arange(start, start + len) over the pairs."""
    before = lens.cumsum(0) - lens
    return torch.arange(int(lens.sum()), device=lens.device) + (starts - before).repeat_interleave(lens)


def _bounds(lens: Tensor) -> Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])
