"""How a receiver's tensors are filled from a sender's, where both hold one model under other names or in other cuts.

    sender                                        receiver
    q_proj [8, 4], k_proj [4, 4], v_proj [4, 4]   qkv_proj [16, 4]: rows 0-7, 8-11, 12-15
    experts.gate_up_proj [E, 2I, H]               experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight, ...

Every tensor starts as one *part*: a plain name, and a view of the tensor. Parts of equal names fit each other; what is
left over on one side is cut (a stack into experts, a fused matrix into its members) until it fits. A view is slices and
at most one transposition, so nothing is copied to place a tensor, or a piece of one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping as Named
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import Manifest, log_agreed

WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\.")
PREFIXES = re.compile(r"^(?:(?:base_model|module|model|language_model|transformer|backbone)\.)+(?=.)")
ADAPTERS = re.compile(r"(^|\.)(lora_\w+|modules_to_save|original_module|ia3_l|prompt_encoder)(\.|$)")
STACKED = re.compile(r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:_(bias))?$")
RENAMED = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"\.self_attn\.forget_gate\."), ".self_attn."),
    (re.compile(r"\.router\.layer\."), ".router."),
    (re.compile(r"\.input_linear\.weight$"), ".experts.gate_up_proj"),
    (re.compile(r"\.output_linear\.weight$"), ".experts.down_proj"),
    (re.compile(r"\.experts\.w13_(weight|bias)$"), r".experts.*.gate_up_proj.\1"),
    (re.compile(r"\.experts\.w2_(weight|bias)$"), r".experts.*.down_proj.\1"),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (STACKED, lambda found: f".experts.*.{found[1]}.{found[2] or 'weight'}"),
)
"""Names that checkpoints, samplers and versions of transformers use for one thing; `*` stands for all experts."""
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}
"""A matrix whose rows are those of its members, one member after the other."""


@dataclass(frozen=True)
class View:
    """What one part is of its tensor: an integer or a slice for each dimension, the last two exchanged at the end."""

    index: tuple[int | slice, ...]
    is_transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`, sharing its memory."""
        part = tensor[self.index]
        return part.transpose(-1, -2) if self.is_transposed else part

    def cut(self, dim: int, index: int | slice) -> View:
        """A part of this part: `index` of its dimension `dim`."""
        free = [at for at, one in enumerate(self.index) if isinstance(one, slice)]
        if self.is_transposed:
            free[-1], free[-2] = free[-2], free[-1]
        old = self.index[free[dim]]
        assert isinstance(old, slice)
        new = (old.start + index * old.step) if isinstance(index, int) else _within(old, index)
        return replace(self, index=(*self.index[: free[dim]], new, *self.index[free[dim] + 1 :]))


def _whole(shape: tuple[int, ...]) -> View:
    return View(tuple(slice(0, size, 1) for size in shape))


def _within(outer: slice, inner: slice) -> slice:
    """`inner`, which counts the elements of `outer`, as a slice of what `outer` is of."""
    start, step = outer.start + inner.start * outer.step, outer.step * inner.step
    return slice(start, start + _length(inner) * step, step)


def _length(part: slice) -> int:
    return max(-(-(part.stop - part.start) // part.step), 0)


@dataclass(frozen=True)
class Piece:
    """`source` of a sender's tensor goes `into` the receiver's tensor of this name; both views have one shape."""

    receiver: str
    into: View
    source: View


@dataclass(frozen=True)
class Mapping:
    """Where every tensor of the sender goes. Made by `match`: complete, and no element of the receiver is filled twice.

    `by_sender`: the pieces of each of the sender's tensors, in the order of the sender's manifest.
    """

    sender: Manifest
    receiver: Manifest
    by_sender: Named[str, tuple[Piece, ...]]

    def pieces(self, sender_name: str) -> tuple[Piece, ...]:
        """Where one tensor of the sender goes. Raises WeightSyncError for a name that was not agreed on."""
        if sender_name not in self.by_sender:
            raise WeightSyncError(f"{sender_name!r} was sent, and is not among the names that were agreed on")
        return self.by_sender[sender_name]

    @torch.no_grad()
    def write(self, targets: Named[str, Tensor], sender_name: str, values: Tensor, start: int | None = None) -> None:
        """Put a tensor of the sender, or a run of its elements, to its places in `targets` (receiver name -> tensor).

        values: the whole tensor; with `start`, the elements from there on, `[n]`, counted row by row.
        """
        if start is None:
            for piece in self.pieces(sender_name):
                piece.into.of(targets[piece.receiver]).copy_(piece.source.of(values))
            return
        shape = self.sender.specs[sender_name].shape
        for offset, box in _boxes(shape, start, start + values.numel()):
            lens = [hi - lo for lo, hi in box]
            part = values[offset : offset + math.prod(lens)].view(lens)
            for piece in self.pieces(sender_name):
                _write_box(piece, targets[piece.receiver], box, part)

    @torch.no_grad()
    def read_back(self, targets: Named[str, Tensor], sender_name: str) -> Tensor:
        """A tensor of the sender as `targets` hold it: a view where it lies there in one piece, otherwise a copy.

        Raises WeightSyncError when it went to several places and they hold different values.
        """
        spec = self.sender.specs[sender_name]
        found: Tensor | None = None
        for piece in self.pieces(sender_name):
            held = piece.into.of(targets[piece.receiver])
            if piece.source == _whole(spec.shape):
                if found is not None and not torch.equal(found, held):
                    raise WeightSyncError(
                        f"{piece.receiver!r} does not hold what {sender_name!r} put there; call sync_weights() again"
                    )
                found = held if found is None else found
                continue
            if found is None:
                found = torch.empty(spec.shape, dtype=held.dtype, device=held.device)
            piece.source.of(found).copy_(held)
        assert found is not None
        return found

    def places(self, targets: Named[str, Tensor], sender_name: str) -> list[Tensor]:
        """The parts of `targets` that are, each, all of a tensor of the sender; none where it is cut."""
        if sender_name in self._same:
            return [targets[self._same[sender_name]]]
        pieces = self.pieces(sender_name)
        is_whole = all(piece.source == _whole(self.sender.specs[sender_name].shape) for piece in pieces)
        return [piece.into.of(targets[piece.receiver]) for piece in pieces] if is_whole else []

    @cached_property
    def _same(self) -> dict[str, str]:
        """The receiver's name of every tensor that is one whole tensor on both sides, laid out alike."""
        found = {}
        for name, pieces in self.by_sender.items():
            whole = _whole(self.sender.specs[name].shape)
            if len(pieces) == 1 and pieces[0].into == pieces[0].source == whole:
                held = self.receiver.specs[pieces[0].receiver]
                found |= {name: pieces[0].receiver} if held.shape == self.sender.specs[name].shape else {}
        return found

    def check(self, targets: Named[str, Tensor]) -> None:
        """Raises WeightSyncError when `targets` are not the tensors that were agreed on."""
        for name, spec in self.receiver.specs.items():
            held = targets.get(name)
            if held is None or tuple(held.shape) != spec.shape:
                what = "absent" if held is None else f"of shape {list(held.shape)}"
                raise WeightSyncError(f"{name!r} is {what}, {list(spec.shape)} was agreed on; match() the names anew")


@dataclass(frozen=True)
class _Part:
    """`view` of a tensor, known by `names`: all plain ones of a whole tensor (several if it is tied), or the cut's own.

    is_in_turns: rows of gate and up alternate in it.
    """

    names: tuple[str, ...]
    owner: str
    shape: tuple[int, ...]
    dtype: str
    view: View
    is_in_turns: bool

    @property
    def name(self) -> str:
        """The first one."""
        return self.names[0]

    @property
    def shown(self) -> str:
        """For messages: the tensor's own name, and which part of it this is."""
        is_whole = not {self.owner, plain_name(self.owner)}.isdisjoint(self.names)
        return repr(self.owner) if is_whole else f"{self.owner!r} ({self.name})"

    def cut(self, name: str, dim: int, index: int | slice) -> _Part:
        """`index` of dimension `dim`, as a part of its own."""
        size = () if isinstance(index, int) else (_length(index),)
        shape = (*self.shape[:dim], *size, *self.shape[dim + 1 :])
        return replace(self, names=(name,), shape=shape, view=self.view.cut(dim, index))

    def transposed(self) -> _Part:
        """With the last two dimensions exchanged."""
        *outer, rows, columns = self.shape
        view = replace(self.view, is_transposed=not self.view.is_transposed)
        return replace(self, shape=(*outer, columns, rows), view=view)


def match(sender: Manifest, receiver: Manifest, *, context: str | None = None) -> Mapping:
    """Where each tensor of the sender goes, with nothing left over on either side.

    Served are: equal names, other prefixes, tied weights, the names of PEFT's base layers, q, k, v and gate, up in one
    matrix or each its own, experts in one stack (also transposed, and gate and up in turns as gpt-oss has them) or each
    its own. context: the mechanism in the documented log line; None where it is agreed on later, see `log_agreed`.

    Raises:
        WeightSyncError: a name has no counterpart, a shape or dtype differs, or one side holds adapters.
    """
    mapping = _matched(sender.text, receiver.text)
    if context is not None:
        log_agreed(sender, receiver, context=context)
    return mapping


@lru_cache(4)
def _matched(sender_text: str, receiver_text: str) -> Mapping:
    """The same for two models whose names, shapes and dtypes did not change since the last sync."""
    sender, receiver = Manifest.from_text(sender_text), Manifest.from_text(receiver_text)
    for side, manifest in (("sender", sender), ("receiver", receiver)):
        _refuse_adapters(side, manifest)
    return _identity(sender) if sender == receiver else _Matcher(sender, receiver).mapping()


def _identity(manifest: Manifest) -> Mapping:
    """Where both sides hold the same: what the matcher would find, in a tenth of the time."""
    wholes = {name: _whole(spec.shape) for name, spec in manifest.specs.items()}
    return Mapping(manifest, manifest, {name: (Piece(name, whole, whole),) for name, whole in wholes.items()})


@lru_cache(1 << 17)
def plain_name(name: str) -> str:
    """The name without what wrappers and containers add to it, and with one spelling for what has several."""
    name = PREFIXES.sub("", WRAPPERS.sub("", name))
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name


class _Matcher:
    """The parts of both sides that have no counterpart yet, and the pieces made of those that have."""

    def __init__(self, sender: Manifest, receiver: Manifest) -> None:
        self._sender, self._receiver = sender, receiver
        ambiguous = _ambiguous(sender) | _ambiguous(receiver)
        self._sent, self._held = _parts(sender, ambiguous), _parts(receiver, ambiguous)
        self._pieces: dict[str, list[Piece]] = {name: [] for name in sender.specs}

    def mapping(self) -> Mapping:
        """Raises WeightSyncError."""
        self._sent, self._held = _turn_stacks(self._sent, self._held)
        self._fit()
        for cut in (_experts_of, _members_of):
            sent, held = _by_name(self._sent), _by_name(self._held)
            self._sent = [one for part in self._sent for one in cut(part, held)]
            self._held = [one for part in self._held for one in cut(part, sent)]
            self._fit()
        if self._sent or self._held:
            self._refuse()
        return Mapping(self._sender, self._receiver, {name: tuple(found) for name, found in self._pieces.items()})

    def _fit(self) -> None:
        """Pair the parts whose names are equal; one part of the sender may serve several of the receiver."""
        sent = _by_name(self._sent)
        left, used = [], set()
        for part in self._held:
            source = next((sent[name] for name in part.names if name in sent), None)
            if source is None:
                left.append(part)
                continue
            if (source.shape, source.dtype) != (part.shape, part.dtype):
                self._refuse_pair(source, part)
            self._pieces[source.owner].append(Piece(part.owner, part.view, source.view))
            used.add(source.names)
        self._held = left
        self._sent = [part for part in self._sent if part.names not in used]

    def _refuse(self) -> NoReturn:
        side, part = ("receiver", self._held[0]) if self._held else ("sender", self._sent[0])
        known = self._receiver.aliases
        is_tied_there = side == "sender" and any(name in map(plain_name, known) for name in part.names)
        raise WeightSyncError(
            f"weight names differ: {part.shown} exists on the {side} only ({self._counts()}); "
            + (
                "the receiver ties it to another weight: set tie_word_embeddings alike on both sides"
                if is_tied_there
                else "both sides must hold the same model"
            )
        )

    def _refuse_pair(self, sent: _Part, held: _Part) -> NoReturn:
        source = "" if sent.owner == held.owner else f" (sent as {sent.shown})"
        raise WeightSyncError(
            f"{held.shown}{source} is {sent.dtype}{list(sent.shape)} on the sender and {held.dtype}{list(held.shape)} "
            f"on the receiver ({self._counts()}); both sides must hold the same model in the same dtype"
        )

    def _counts(self) -> str:
        return f"sender {len(self._sender.specs)} tensors, receiver {len(self._receiver.specs)}"


def _parts(manifest: Manifest, ambiguous: set[str]) -> list[_Part]:
    """Every tensor as one part. A plain name that stands for two tensors is left out for the full one."""
    known: dict[str, list[str]] = {name: [name] for name in manifest.specs}
    for alias, name in manifest.aliases.items():
        known[name].append(alias)
    plain = {
        owner: tuple(dict.fromkeys(name if plain_name(name) in ambiguous else plain_name(name) for name in names))
        for owner, names in known.items()
    }
    in_turns = {names[0].removesuffix("bias") for names in plain.values() if names[0].endswith(".*.gate_up_proj.bias")}
    return [
        _Part(
            plain[owner],
            owner,
            spec.shape,
            spec.dtype,
            _whole(spec.shape),
            plain[owner][0].rpartition(".")[0] + "." in in_turns,
        )
        for owner, spec in manifest.specs.items()
    ]


def _ambiguous(manifest: Manifest) -> set[str]:
    """Plain names that stand for several tensors of one side."""
    owners = {(plain_name(name), name) for name in manifest.specs}
    owners |= {(plain_name(alias), name) for alias, name in manifest.aliases.items()}
    return {name for name, count in Counter(plain for plain, _ in owners).items() if count > 1}


def _by_name(parts: list[_Part]) -> dict[str, _Part]:
    return {name: part for part in parts for name in part.names}


def _experts_of(part: _Part, others: Named[str, _Part]) -> list[_Part]:
    """A stack as its experts, where the other side has them one by one."""
    prefix, star, leaf = part.name.partition(".*.")
    first = f"{prefix}.0.{leaf}"
    if not star or not any(name in others for name in (first, *_member_names(first))):
        return [part]
    return [part.cut(f"{prefix}.{expert}.{leaf}", 0, expert) for expert in range(part.shape[0])]


def _members_of(part: _Part, others: Named[str, _Part]) -> list[_Part]:
    """A fused matrix as its members, where the other side has them one by one."""
    names = _member_names(part.name)
    if not names or not all(name in others for name in names):
        return [part]
    dim = 1 if ".*." in part.name else 0
    lens = [others[name].shape[dim] for name in names]
    if sum(lens) != part.shape[dim]:
        raise WeightSyncError(
            f"{part.shown} has {part.shape[dim]} rows, {', '.join(others[name].shown for name in names)} have "
            f"{' + '.join(map(str, lens))}; both sides must hold the same model"
        )
    if part.is_in_turns:
        return [part.cut(name, dim, slice(at, part.shape[dim], len(names))) for at, name in enumerate(names)]
    ends = list(accumulate(lens))
    return [part.cut(name, dim, slice(end - size, end, 1)) for name, size, end in zip(names, lens, ends, strict=True)]


def _member_names(name: str) -> list[str]:
    """The names of what is fused under `name`, none if nothing is."""
    path, _, leaf = name.rpartition(".")
    outer, dot, module = path.rpartition(".")
    return [f"{outer}{dot}{member}.{leaf}" for member in FUSED.get(module, ())]


def _turn_stacks(sent: list[_Part], held: list[_Part]) -> tuple[list[_Part], list[_Part]]:
    """Both sides, with the stacks of one transposed where only that gives the other's shapes.

    All stacks of a layer are looked at together: a square matrix alone does not tell.
    """
    of_held = _turned_layers(held, _by_name(sent))
    of_sent = _turned_layers(sent, _by_name(held)) - of_held
    return [_turned(part, of_sent) for part in sent], [_turned(part, of_held) for part in held]


def _turned_layers(parts: list[_Part], others: Named[str, _Part]) -> set[str]:
    pairs: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for part in parts:
        wanted = _matrix_shape(part.name, others) if _is_stack(part) else None
        if wanted is not None:
            pairs.setdefault(_layer_of(part), []).append((part.shape[1:], wanted))
    return {
        layer
        for layer, known in pairs.items()
        if any(ours != theirs for ours, theirs in known) and all(ours[::-1] == theirs for ours, theirs in known)
    }


def _turned(part: _Part, layers: set[str]) -> _Part:
    return part.transposed() if _is_stack(part) and _layer_of(part) in layers else part


def _is_stack(part: _Part) -> bool:
    """Of matrices; one of biases has no other layout."""
    return ".*." in part.name and len(part.shape) == 3


def _layer_of(part: _Part) -> str:
    return part.name.partition(".*.")[0]


def _matrix_shape(stack: str, others: Named[str, _Part]) -> tuple[int, ...] | None:
    """What one expert's matrix of a stack is on the other side, be it cut there or not; None if it is not there."""
    for name in (stack, stack.replace(".*.", ".0.")):
        dim = 1 if ".*." in name else 0
        if name in others:
            return others[name].shape[dim:]
        members = [others[member].shape[dim:] for member in _member_names(name) if member in others]
        if members:
            return sum(rows for rows, _ in members), members[0][1]
    return None


def _refuse_adapters(side: str, manifest: Manifest) -> None:
    found = sorted(name for name in (*manifest.specs, *manifest.aliases) if ADAPTERS.search(name))
    if found:
        advice = (
            "send base and adapters merged, as arctic_platform.rl.engines.lora.merged_weights yields them"
            if side == "sender"
            else "it would apply them to weights that hold them already: give it the model without adapters"
        )
        raise WeightSyncError(
            f"the {side} holds {len(found)} tensors of adapters among {len(manifest.specs)}, first {found[0]!r}; "
            f"{advice}"
        )


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Elements `start` to `stop` of a tensor, counted row by row, as boxes: (elements before it, bounds of each dim).

    . . . a a        a: the end of a row, b: whole rows, c: the start of a row
    b b b b b
    c c . . .
    """
    if not shape:
        yield from [(0, [])] if stop > start else []
        return
    row = math.prod(shape[1:])
    done = 0
    while start + done < stop:
        at, into = divmod(start + done, row)
        left = stop - start - done
        if into == 0 and left >= row:
            yield done, [(at, at + left // row), *((0, size) for size in shape[1:])]
            done += left // row * row
            continue
        num = min(row - into, left)
        for offset, box in _boxes(shape[1:], into, into + num):
            yield done + offset, [(at, at + 1), *box]
        done += num


def _write_box(piece: Piece, target: Tensor, box: list[tuple[int, int]], values: Tensor) -> None:
    """Copy what a piece takes of a box of its sender's tensor; `values` are the box."""
    taken: list[int | slice] = []
    places: list[slice] = []
    for index, (lo, hi) in zip(piece.source.index, box, strict=True):
        if isinstance(index, int):
            if not lo <= index < hi:
                return
            taken.append(index - lo)
            continue
        first = max(-(-(lo - index.start) // index.step), 0)
        last = min(-(-(hi - index.start) // index.step), _length(index))
        if first >= last:
            return
        begin = index.start + first * index.step - lo
        taken.append(slice(begin, begin + (last - first - 1) * index.step + 1, index.step))
        places.append(slice(first, last))
    part = values[tuple(taken)]
    if piece.source.is_transposed:
        places[-1], places[-2] = places[-2], places[-1]
        part = part.transpose(-1, -2)
    piece.into.of(target)[tuple(places)].copy_(part)
