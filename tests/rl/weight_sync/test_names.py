"""A receiver is filled from a sender that names or cuts the same weights differently, and nothing is left over."""

import logging
from collections.abc import Mapping as Named
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.engines.models import quiet_transformers, tiny_model
from arctic_platform.rl.weight_sync.base import Manifest, TensorSpec, manifest_of, weights_of
from arctic_platform.rl.weight_sync.names import Mapping, match
from tests.zorro_train.architectures import HAS_BATCHED_EXPERTS, build

RUN_LENS = [1, 7, 64, 1000]
ON_DISK = [
    "qwen3_moe", "mixtral", "minimax_m2", "deepseek_v3", "glm4_moe", "qwen3_5_moe", "granitemoe", "gpt_neox", "jamba",
    "nemotron_h", "gpt_oss", "llama4", "phi3", "gpt2",
]  # fmt: skip
"""Families whose checkpoints name or cut experts in all the ways that this transformers knows, and some that do not."""


def numbered(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors whose elements are all different."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name.replace("__", ".")] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return tensors


def manifest(tensors: Named[str, Tensor], **aliases: str) -> Manifest:
    specs = {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    return Manifest(specs, {alias.replace("__", "."): name for alias, name in aliases.items()})


def fill(mapping: Mapping, sent: Named[str, Tensor], run_len: int | None = None) -> dict[str, Tensor]:
    """The receiver's tensors after all of the sender's came, whole or in runs of `run_len` elements."""
    targets = {name: torch.full(spec.shape, torch.nan) for name, spec in mapping.receiver.specs.items()}
    for name, tensor in sent.items():
        flat = tensor.detach().contiguous().view(-1)
        if run_len is None:
            mapping.write(targets, name, tensor.detach())
            continue
        for start in range(0, flat.numel(), run_len):
            mapping.write(targets, name, flat[start : start + run_len], start)
    return targets


def assert_serves(sent: Named[str, Tensor], wanted: Named[str, Tensor]) -> None:
    """`wanted` comes out of `sent` bit for bit, in pieces of any size, can be read back, and the same the other way."""
    for ours, theirs in ((sent, wanted), (wanted, sent)):
        mapping = match(manifest(ours), manifest(theirs))
        for run_len in (None, *RUN_LENS):
            found = fill(mapping, ours, run_len)
            assert found.keys() == theirs.keys()
            assert all(torch.equal(found[name], theirs[name]) for name in theirs)
        assert all(torch.equal(mapping.read_back(found, name), ours[name]) for name in ours)


@pytest.mark.parametrize("family", ON_DISK)
def test_a_model_and_its_checkpoint_serve_each_other(family: str, tmp_path: Path) -> None:
    model = build(family)
    with quiet_transformers():
        model.save_pretrained(tmp_path)
    saved = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    own = weights_of(model)
    for sent, held, sender, receiver in (
        (own, saved, manifest_of(model), manifest(saved)),
        (saved, own, manifest(saved), manifest_of(model)),
    ):
        mapping = match(sender, receiver)
        found = fill(mapping, sent, 4096)
        assert all(torch.equal(found[name], held[name]) for name in held)
        assert all(torch.equal(mapping.read_back(found, name), sent[name]) for name in sent)


def test_fused_queries_keys_and_values_are_filled_from_three_and_cut_into_three() -> None:
    parts = numbered(a__q_proj__weight=(8, 4), a__k_proj__weight=(3, 4), a__v_proj__weight=(3, 4))
    biases = numbered(a__q_proj__bias=(8,), a__k_proj__bias=(3,), a__v_proj__bias=(3,))
    whole = {"a.qkv_proj.weight": torch.cat(list(parts.values())), "a.qkv_proj.bias": torch.cat(list(biases.values()))}
    assert_serves({**parts, **biases}, whole)
    bare = numbered(q_proj__weight=(2, 1), k_proj__weight=(1, 1), v_proj__weight=(1, 1))
    assert_serves(bare, {"qkv_proj.weight": torch.cat(list(bare.values()))})


def test_gate_and_up_are_fused_and_cut() -> None:
    parts = numbered(mlp__gate_proj__weight=(6, 4), mlp__up_proj__weight=(6, 4))
    assert_serves(parts, {"mlp.gate_up_proj.weight": torch.cat(list(parts.values()))})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.layers.0.mlp.up_proj.weight", "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "module.model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "base_model.model.lm_head.weight"),
    ],
)
def test_prefixes_and_wrappers_are_no_part_of_a_name(ours: str, theirs: str) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert_serves({ours: tensor}, {theirs: tensor})


def test_a_base_layer_that_peft_wrapped_fills_its_rows_of_a_fused_matrix() -> None:
    parts = numbered(
        base_model__model__model__layers__0__self_attn__q_proj__base_layer__weight=(8, 4),
        base_model__model__model__layers__0__self_attn__k_proj__weight=(4, 4),
        base_model__model__model__layers__0__self_attn__v_proj__base_layer__weight=(4, 4),
    )
    assert_serves(parts, {"model.layers.0.self_attn.qkv_proj.weight": torch.cat(list(parts.values()))})


def test_names_that_differ_in_their_prefix_alone_stay_two_weights() -> None:
    tensors = numbered(model__norm__weight=(4,), language_model__norm__weight=(4,))
    mapping = match(manifest(tensors), manifest(dict(reversed(tensors.items()))))
    assert all(torch.equal(found, tensors[name]) for name, found in fill(mapping, tensors).items())


@pytest.mark.parametrize("how", ["same order", "other first name", "other prefix", "head not listed"])
def test_a_tied_weight_is_one_tensor_under_all_its_names(how: str) -> None:
    sent = numbered(model__embed_tokens__weight=(6, 4))
    sender = manifest(sent, lm_head__weight="model.embed_tokens.weight")
    receiver = {
        "same order": sender,
        "other first name": manifest(numbered(lm_head__weight=(6, 4)), model__embed_tokens__weight="lm_head.weight"),
        "other prefix": manifest(numbered(embed_tokens__weight=(6, 4)), lm_head__weight="embed_tokens.weight"),
        "head not listed": manifest(numbered(embed_tokens__weight=(6, 4))),
    }[how]
    for ours, theirs in ((sender, receiver), (receiver, sender)):
        (name,) = ours.specs
        (found,) = fill(match(ours, theirs), {name: sent["model.embed_tokens.weight"]}, 5).values()
        assert torch.equal(found, sent["model.embed_tokens.weight"])


def test_an_untied_receiver_gets_a_tied_weight_twice_and_both_are_read_back() -> None:
    sent = numbered(model__embed_tokens__weight=(6, 4))
    mapping = match(
        manifest(sent, lm_head__weight="model.embed_tokens.weight"),
        manifest(numbered(embed_tokens__weight=(6, 4), lm_head__weight=(6, 4))),
    )
    found = fill(mapping, sent, 5)
    assert torch.equal(found["embed_tokens.weight"], found["lm_head.weight"])
    found["lm_head.weight"][2, 1] += 1.0
    with pytest.raises(WeightSyncError, match=r"'lm_head\.weight' does not hold what"):
        mapping.read_back(found, "model.embed_tokens.weight")


def test_a_tied_receiver_is_told_to_untie() -> None:
    two = numbered(model__embed_tokens__weight=(6, 4), lm_head__weight=(6, 4))
    one = manifest(numbered(model__embed_tokens__weight=(6, 4)), lm_head__weight="model.embed_tokens.weight")
    with pytest.raises(WeightSyncError, match=r"'lm_head.weight' exists on the sender only .*tie_word_embeddings"):
        match(manifest(two), one)


def experts(num: int = 3, inner: int = 5, hidden: int = 4, *, biased: bool = False) -> dict[str, Tensor]:
    """One by one."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    names = {f"mlp__experts__{at}__{name}__weight": shape for at in range(num) for name, shape in shapes.items()}
    if biased:
        names |= {f"mlp__experts__{at}__{name}__bias": shape[:1] for at in range(num) for name, shape in shapes.items()}
    return numbered(**names)


def stacked(one_by_one: dict[str, Tensor], *, transposed: bool = False, in_turns: bool = False) -> dict[str, Tensor]:
    """The slow way: experts stacked, gate above up or in turns with it."""
    num = 1 + max(int(name.split(".")[2]) for name in one_by_one)
    found = {}
    for leaf in ("weight", "bias"):
        if f"mlp.experts.0.gate_proj.{leaf}" not in one_by_one:
            continue
        both, down = [], []
        for at in range(num):
            gate, up = (one_by_one[f"mlp.experts.{at}.{name}.{leaf}"] for name in ("gate_proj", "up_proj"))
            both.append(torch.stack([gate, up], 1).flatten(0, 1) if in_turns else torch.cat([gate, up]))
            down.append(one_by_one[f"mlp.experts.{at}.down_proj.{leaf}"])
        pair = torch.stack(both), torch.stack(down)
        if transposed and leaf == "weight":
            pair = pair[0].mT.contiguous(), pair[1].mT.contiguous()
        suffix = "" if leaf == "weight" else "_bias"
        found |= {f"mlp.experts.gate_up_proj{suffix}": pair[0], f"mlp.experts.down_proj{suffix}": pair[1]}
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5, 4), (2, 4, 4), (2, 2, 4), (1, 4, 2)])
def test_experts_of_any_sizes_go_into_stacks_of_either_layout_and_back(sizes: tuple, transposed: bool) -> None:
    one_by_one = experts(*sizes)
    assert_serves(one_by_one, stacked(one_by_one, transposed=transposed))


def test_stacks_of_the_two_layouts_serve_each_other_even_where_one_matrix_is_square() -> None:
    for sizes in ((3, 5, 4), (2, 4, 4), (2, 2, 4)):
        one_by_one = experts(*sizes)
        assert_serves(stacked(one_by_one), stacked(one_by_one, transposed=True))


def test_experts_with_biases_have_gate_and_up_in_turns_as_gpt_oss_stacks_them() -> None:
    one_by_one = experts(biased=True)
    assert_serves(one_by_one, stacked(one_by_one, transposed=True, in_turns=True))


@pytest.mark.skipif(not HAS_BATCHED_EXPERTS, reason="experts of transformers 4 are modules")
def test_gate_and_up_of_gpt_oss_are_what_its_experts_use() -> None:
    model = build("gpt_oss")
    layer = model.model.layers[0].mlp.experts
    own = {f"mlp.experts.{name}": param.detach() for name, param in layer.named_parameters()}
    names = experts(layer.num_experts, 96, 64, biased=True)
    found = fill(match(manifest(own), manifest(names)), own)
    hidden = torch.randn(2, 64)
    gate, up = (
        torch.nn.functional.linear(hidden, found[f"mlp.experts.1.{name}.weight"], found[f"mlp.experts.1.{name}.bias"])
        for name in ("gate_proj", "up_proj")
    )
    expected = layer._apply_gate(hidden @ layer.gate_up_proj[1] + layer.gate_up_proj_bias[1])
    gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
    torch.testing.assert_close((up + 1) * gate * torch.sigmoid(gate * layer.alpha), expected)


def test_a_stack_of_fused_pairs_is_cut_into_stacks_and_into_fused_experts() -> None:
    one_by_one = experts()
    whole = stacked(one_by_one)
    half = {"mlp.experts.down_proj": whole["mlp.experts.down_proj"]}
    for name, rows in (("gate_proj", slice(0, 5)), ("up_proj", slice(5, 10))):
        half[f"mlp.experts.{name}"] = whole["mlp.experts.gate_up_proj"][:, rows].contiguous()
    fused = {f"mlp.experts.{at}.gate_up_proj.weight": both for at, both in enumerate(whole["mlp.experts.gate_up_proj"])}
    fused |= {name: tensor for name, tensor in one_by_one.items() if "down_proj" in name}
    for other in (half, fused):
        assert_serves(whole, other)
        assert_serves(one_by_one, other)
    vllm = {
        "mlp.experts.w13_weight": whole["mlp.experts.gate_up_proj"],
        "mlp.experts.w2_weight": half["mlp.experts.down_proj"],
    }
    assert_serves(one_by_one, vllm)


def test_buffers_and_scalars_are_weights_like_any_other() -> None:
    assert_serves(*[numbered(model__scale=(), model__gate__e_score_correction_bias=(4,))] * 2)


def test_runs_fit_whatever_dimensions_a_tensor_has() -> None:
    tensors = numbered(a=(), b=(5,), c=(2, 3), d=(3, 2, 4), e=(2, 3, 1, 3), f=(0, 4))
    assert_serves(tensors, tensors)


def test_read_back_copies_nothing_where_a_tensor_lies_in_one_piece() -> None:
    parts = numbered(a__q_proj__weight=(8, 4), a__k_proj__weight=(3, 4), a__v_proj__weight=(3, 4))
    mapping = match(manifest(parts), manifest({"a.qkv_proj.weight": torch.cat(list(parts.values()))}))
    found = fill(mapping, parts)
    held = mapping.read_back(found, "a.k_proj.weight")
    assert held.untyped_storage().data_ptr() == found["a.qkv_proj.weight"].untyped_storage().data_ptr()


def test_a_place_is_what_may_be_written_without_sorting() -> None:
    parts = numbered(a__q_proj__weight=(8, 4), a__k_proj__weight=(3, 4), a__v_proj__weight=(3, 4))
    mapping = match(manifest(parts), manifest({"a.qkv_proj.weight": torch.zeros(14, 4)}))
    targets = {"a.qkv_proj.weight": torch.zeros(14, 4)}
    for name, tensor in parts.items():
        (place,) = mapping.places(targets, name)
        place.view(-1).copy_(tensor.view(-1))
    assert torch.equal(targets["a.qkv_proj.weight"], torch.cat(list(parts.values())))
    back = match(mapping.receiver, mapping.sender)
    assert back.places(parts, "a.qkv_proj.weight") == []
    tied = match(
        manifest(numbered(a=(2,)), b="a"), Manifest({name: TensorSpec((2,), "float32") for name in ("a", "b")}, {})
    )
    assert len(tied.places(numbered(a=(2,), b=(2,)), "a")) == 2
    one_by_one = experts()
    turned = stacked(one_by_one, transposed=True)
    (place,) = match(manifest(one_by_one), manifest(turned)).places(turned, "mlp.experts.1.down_proj.weight")
    assert not place.is_contiguous()


def test_a_pair_of_which_one_half_came_is_seen_in_what_is_read_back() -> None:
    parts = numbered(mlp__gate_proj__weight=(6, 4), mlp__up_proj__weight=(6, 4))
    mapping = match(manifest(parts), manifest({"mlp.gate_up_proj.weight": torch.zeros(12, 4)}))
    targets = {"mlp.gate_up_proj.weight": torch.zeros(12, 4)}
    mapping.write(targets, "mlp.gate_proj.weight", parts["mlp.gate_proj.weight"])
    assert torch.equal(mapping.read_back(targets, "mlp.gate_proj.weight"), parts["mlp.gate_proj.weight"])
    assert not torch.equal(mapping.read_back(targets, "mlp.up_proj.weight"), parts["mlp.up_proj.weight"])


Q, K, V = "a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"


@pytest.mark.parametrize(
    ("sent", "held", "message"),
    [
        (
            {Q: (8, 4)},
            {Q: (8, 4), K: (3, 4)},
            r"'a\.k_proj\.weight' exists on the receiver only \(sender 1 .* receiver 2",
        ),
        ({Q: (8, 4), K: (3, 4)}, {Q: (8, 4)}, r"'a\.k_proj\.weight' exists on the sender only"),
        ({"a": (2,), "b": (2,)}, {"a": (2,)}, "'b' exists on the sender only"),
        ({"a": (2,)}, {"a": (2,), "b": ()}, "'b' exists on the receiver only"),
        ({Q: (8, 4)}, {Q: (8, 5)}, r"\[8, 4\] on the sender and float32\[8, 5\]"),
        ({Q: (8, 4), K: (3, 4)}, {"a.qkv_proj.weight": (14, 4)}, r"'a\.qkv_proj\.weight' exists on the receiver only"),
        ({Q: (8, 4), K: (3, 4), V: (3, 4)}, {"a.qkv_proj.weight": (15, 4)}, r"has 15 rows, .*8 \+ 3 \+ 3"),
        ({Q: (8, 4), K: (3, 4), V: (3, 5)}, {"a.qkv_proj.weight": (14, 4)}, r"a\.v_proj\.weight.*\[3, 5\]"),
        (
            {"mlp.experts.down_proj": (3, 4, 5)},
            {f"mlp.experts.{at}.down_proj.weight": (4, 5) for at in range(4)},
            r"'mlp\.experts\.3\.down_proj\.weight' exists on the receiver only",
        ),
        (
            {"mlp.experts.down_proj": (4, 4, 5)},
            {f"mlp.experts.{at}.down_proj.weight": (4, 5) for at in range(3)},
            r"'mlp\.experts\.down_proj' \(.*\.3\..*\) exists on the sender only",
        ),
        ({Q: (8, 4), "a.q_proj.lora_A.default.weight": (2, 4)}, {Q: (8, 4)}, "the sender holds 1 tensors of adapters"),
        ({Q: (8, 4)}, {Q: (8, 4), "a.q_proj.lora_B.default.weight": (8, 2)}, "hold them already"),
        ({"lm_head.modules_to_save.default.weight": (8, 4)}, {"lm_head.weight": (8, 4)}, "tensors of adapters"),
    ],
)
def test_what_does_not_fit_is_named_with_the_counts_of_both_sides(sent: dict, held: dict, message: str) -> None:
    sender, receiver = (Manifest({n: TensorSpec(s, "float32") for n, s in side.items()}, {}) for side in (sent, held))
    with pytest.raises(WeightSyncError, match=message):
        match(sender, receiver)


def test_dtypes_must_be_equal() -> None:
    model = tiny_model()
    with pytest.raises(WeightSyncError, match=r"is float32.* and bfloat16"):
        match(manifest_of(model), manifest_of(tiny_model().to(torch.bfloat16)))


def test_a_name_that_was_not_agreed_on_is_refused() -> None:
    mapping = match(manifest(numbered(a=(2,))), manifest(numbered(a=(2,))))
    with pytest.raises(WeightSyncError, match="'b' was sent"):
        mapping.pieces("b")


def test_the_documented_line_counts_the_tensors_of_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    parts = numbered(mlp__gate_proj__weight=(6, 4), mlp__up_proj__weight=(6, 4))
    with caplog.at_level(logging.INFO, "arctic_platform.rl.weight_sync"):
        match(manifest(parts), manifest({"mlp.gate_up_proj.weight": torch.zeros(12, 4)}), context="stream")
    assert caplog.messages == ["[weight-sync names validated] context=stream sender=2 expected=1"]
