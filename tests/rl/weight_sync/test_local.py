import logging

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.engines.models import copy_model, tiny_model
from arctic_platform.rl.weight_sync import local
from arctic_platform.rl.weight_sync.base import Manifest, TensorSpec, digest, manifest_of, weights_of
from arctic_platform.rl.weight_sync.local import copy_weights, sync_local
from arctic_platform.rl.weight_sync.names import match
from tests.zorro_train.architectures import build

MODES = [False, True]


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with every weight moved."""
    other = copy_model(model)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.01)
    return other


def untied(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights with the head as a tensor of its own."""
    other = copy_model(model)
    other.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    return other


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights_of(model).items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("low_memory", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_receiver_gets_every_bit_and_the_log_line_counts_tensors(
    low_memory: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = tiny_model().to(dtype)
    sender = changed(receiver)
    with caplog.at_level(logging.INFO, "arctic_platform.rl.weight_sync"):
        report = sync_local(sender, receiver, low_memory=low_memory)
    assert_equal(values(receiver), values(sender))
    count = len(weights_of(sender))
    assert f"[weight-sync names validated] context=local sender={count} expected={count}" in caplog.messages
    assert report.num_tensors == count
    assert report.num_bytes == sum(p.numel() * p.element_size() for p in sender.parameters())


def test_weights_are_written_in_place_and_stay_tied() -> None:
    receiver = tiny_model()
    places = {name: tensor.data_ptr() for name, tensor in weights_of(receiver).items()}
    sync_local(changed(receiver), receiver)
    assert {name: tensor.data_ptr() for name, tensor in weights_of(receiver).items()} == places
    assert receiver.lm_head.weight is receiver.model.embed_tokens.weight


def test_tied_weight_is_listed_once_and_known_by_both_names() -> None:
    manifest = manifest_of(tiny_model())
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in manifest.specs


@pytest.mark.parametrize("low_memory", MODES)
def test_untied_receiver_gets_a_tied_weight_under_both_names(low_memory: bool) -> None:
    sender = changed(tiny_model())
    receiver = untied(tiny_model())
    report = sync_local(sender, receiver, low_memory=low_memory)
    assert report.num_tensors == len(weights_of(sender)) + 1
    assert torch.equal(receiver.lm_head.weight, sender.lm_head.weight)
    assert torch.equal(receiver.model.embed_tokens.weight, sender.lm_head.weight)


@pytest.mark.parametrize("low_memory", MODES)
def test_tied_receiver_cannot_hold_two_weights_of_the_sender(low_memory: bool) -> None:
    receiver = tiny_model()
    before = values(receiver)
    with pytest.raises(WeightSyncError, match=r"'lm_head\.weight' exists on the sender only"):
        sync_local(untied(receiver), receiver, low_memory=low_memory)
    assert_equal(values(receiver), before)


def drop_a_norm(model: LlamaForCausalLM) -> None:
    model.model.norm = nn.Identity()


def resize(model: LlamaForCausalLM) -> None:
    model.resize_token_embeddings(128)


def halve(model: LlamaForCausalLM) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("low_memory", MODES)
@pytest.mark.parametrize(
    ("differ", "message"),
    [
        (drop_a_norm, r"'model\.norm\.weight' exists on the receiver only"),
        (resize, r"\[128, 64\]"),
        (halve, "bfloat16"),
    ],
)
def test_models_that_differ_are_refused_before_anything_moves(differ, message: str, low_memory: bool) -> None:
    sender, receiver = tiny_model(1), tiny_model()
    differ(sender)
    before, begun = values(receiver), []
    with pytest.raises(WeightSyncError, match=message):
        sync_local(sender, receiver, low_memory=low_memory, on_overwrite=lambda: begun.append(True))
    assert_equal(values(receiver), before)
    assert not begun


def test_names_are_compared_both_ways() -> None:
    whole, part = manifest_of(tiny_model()), tiny_model()
    drop_a_norm(part)
    with pytest.raises(WeightSyncError, match="exists on the sender only"):
        match(whole, manifest_of(part))


@pytest.mark.parametrize("low_memory", MODES)
def test_digest_that_differs_fails_the_sync(low_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = tiny_model()
    sender, before, begun = changed(receiver), values(receiver), []
    honest, seen = digest, []

    def damaged(tensor: torch.Tensor) -> int:
        seen.append(tensor)
        return honest(tensor) + (len(seen) == 2)

    monkeypatch.setattr(local, "digest", damaged)
    monkeypatch.setattr(local, "DIGEST_THREADS", 1)
    with pytest.raises(WeightSyncError, match="digests differ for"):
        sync_local(sender, receiver, low_memory=low_memory, on_overwrite=lambda: begun.append(True))
    assert bool(begun) is low_memory
    if not low_memory:
        assert_equal(values(receiver), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_digest_sees_one_bit_and_an_exchange_of_rows(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 13).reshape(4, 3).to(dtype)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[2, 1] ^= 1
    assert digest(tensor) == digest(tensor.clone())
    assert len({digest(tensor), digest(flipped), digest(tensor[[1, 0, 2, 3]])}) == 3
    assert digest(torch.empty(0, dtype=dtype)) == digest(torch.empty(0, 3, dtype=dtype))
    assert digest(tensor.T) == digest(tensor.T.contiguous())


@pytest.mark.parametrize("low_memory", MODES)
def test_a_weight_that_never_comes_fails_the_sync(low_memory: bool) -> None:
    receiver = tiny_model()
    sender, before = changed(receiver), values(receiver)
    weights = list(weights_of(sender).items())
    with pytest.raises(WeightSyncError, match=r"never came \(19 of 20 tensors did\)"):
        copy_weights(manifest_of(sender), weights[:-1], receiver, low_memory=low_memory)
    if not low_memory:
        assert_equal(values(receiver), before)


@pytest.mark.parametrize("low_memory", MODES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_model_is_filled_from_weights_as_its_checkpoint_cuts_them(family: str, low_memory: bool) -> None:
    receiver = build(family)
    sender = changed(receiver)
    sent = revert_weight_conversion(sender, dict(weights_of(sender)))
    specs = {name: TensorSpec(tuple(tensor.shape), "float32") for name, tensor in sent.items()}
    report = copy_weights(Manifest(specs, {}), sent.items(), receiver, low_memory=low_memory)
    assert_equal(values(receiver), values(sender))
    assert report.num_tensors == len(weights_of(sender)) < len(sent)
