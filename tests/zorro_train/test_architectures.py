"""Every family against rows run alone, and the faults that are particular to some of them."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer, Lfm2ShortConv

from arctic_platform.errors import InputError, UnsupportedModelError
from arctic_platform.forest import ForestPlan, RowsPlan, build_forest, kernels
from arctic_platform.rl import hybrid
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.proof import measure_receipt, plain_attention, plain_rows
from arctic_platform.rl.zorro_train.staged import can_stage
from tests.zorro_train import sweep
from tests.zorro_train.architectures import FAMILIES, SIZES, build, judge, measure
from tests.zorro_train.twins import VOCAB, gradients, random_rows, relative, rows_alone, split

TABLE = sweep.read_table()
HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "kimi_linear", "falcon_h1", "nemotron_h"]
ROUTER_LOSS = ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe", "gpt_oss", "minimax_m2", "granitemoe"]
NO_ROUTER_LOSS = ["deepseek_v3", "glm4_moe", "llama4", "nemotron_h"]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_does_what_the_table_says(name):
    column = transformers.__version__
    if column not in TABLE[name]:
        pytest.skip(f"docs/architectures.md has no column for transformers {column}")
    verdict = judge(name)
    assert verdict.word == TABLE[name][column], verdict


def test_table_has_the_families_of_the_sweep_and_no_other():
    assert list(TABLE) == list(FAMILIES)
    assert all(TABLE[name]["what is special"] == family.kind for name, family in FAMILIES.items())
    words = {row[version] for row in TABLE.values() for version in sweep.VERSIONS}
    assert words <= {"exact", "refused", "absent"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", sweep.VERSIONS[1:])
def test_sweep_finds_what_the_table_says_with_other_versions(version):
    assert sweep.run_elsewhere(version) == 0


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gpt_neox", "phi", "starcoder2"])
def test_family_without_fp32_casts_is_exact_to_the_last_digits_of_fp64(name):
    errors = measure(name, torch.float64)
    assert max(errors.logprobs, errors.gradients) <= 1e-12, errors


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_5_moe"])
def test_batched_and_eager_experts_agree(name):
    rows, masks = random_rows(3)
    results = []
    for experts in ("eager", "batched_mm"):
        model = build(name)
        model.set_experts_implementation(experts)
        logprobs = ModuleReconstructionPatcher(model).forward_rows(rows, masks).logprobs
        results.append((logprobs, gradients(model, logprobs.square().sum())))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=2e-6)
    assert relative(results[1][1], results[0][1]) <= 1e-5


@pytest.mark.parametrize("name", [*HYBRIDS, "gemma2", "gpt_oss", "deepseek_v3"])
def test_changing_one_row_moves_no_other(name):
    """Token by token, so that a leak through a state or a convolution shows wherever the row lies in the pack."""
    patcher = ModuleReconstructionPatcher(build(name))
    rows, masks = split(["1 2 3 4 5 | 6 7 8", "1 2 3 4 5 | 6 9 10", "1 2 | 3 11", "12 13 | 14"])
    before = patcher.forward_rows(rows, masks)
    for b, row in enumerate(rows):
        changed = [r.copy() for r in rows]
        changed[b][-1] = 20
        after = patcher.forward_rows(changed, masks)
        own = np.arange(before.offsets[b], before.offsets[b + 1])
        others = np.setdiff1d(np.arange(len(before.logprobs)), own)
        assert (after.logprobs - before.logprobs)[others].abs().max() <= 1e-6, row
        assert (after.logprobs - before.logprobs)[own].abs().max() > 1e-4


@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_reach_the_shared_side_of_a_state_under_checkpointing(name):
    model = build(name)
    patcher = ModuleReconstructionPatcher(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    receipt = measure_receipt(patcher, *random_rows(5))
    assert receipt.gradient_rel <= 1e-5
    patcher.forward_rows(*random_rows(5)).logprobs.sum().backward()
    of_states = [p.grad for name, p in model.named_parameters() if "A_log" in name or "conv" in name]
    assert of_states and all(grad is not None and grad.norm() > 0 for grad in of_states)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_two_batches_through_a_hybrid_do_not_mix(name):
    """The plan belongs to the call: the second forward must not reach into the first one's backward."""
    model, plain = build(name), build(name)
    patcher = ModuleReconstructionPatcher(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batches = [random_rows(1), random_rows(2)]
    values = [patcher.forward_rows(*batch).logprobs for batch in batches]
    ours = gradients(model, values[0].sum() + values[1].square().sum())
    expected = [rows_alone(plain, *batch)[0] for batch in batches]
    assert relative(ours, gradients(plain, expected[0].sum() + expected[1].square().sum())) <= 1e-5


def test_compiled_hybrid_is_exact_and_not_compiled_for_every_batch():
    patcher = ModuleReconstructionPatcher(build("qwen3_5"), compile_backend="aot_eager")
    for seed in (1, 2):
        assert measure_receipt(patcher, *random_rows(seed)).gradient_rel <= 1e-5
    counters.clear()
    assert measure_receipt(patcher, *random_rows(3)).logprob_max_abs <= 1e-5
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2", "kimi_linear"])
def test_long_segments_are_scanned_in_chunks_and_exact(name):
    """Longer than a chunk of the scan, not a multiple of it, and with branches inside a chunk."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCAB, 150)
    rows = [np.concatenate([trunk[:cut], rng.integers(0, VOCAB, n)]) for cut, n in ((150, 70), (150, 65), (97, 3))]
    masks = [np.arange(len(row)) >= 60 for row in rows]
    patcher = ModuleReconstructionPatcher(build(name))
    expected, _ = rows_alone(build(name), rows, masks)
    torch.testing.assert_close(patcher.forward_rows(rows, masks).logprobs, expected, rtol=5e-6, atol=5e-6)


def test_an_unpatched_hybrid_runs_as_if_it_had_never_been_prepared():
    model, plain = build("qwen3_5"), build("qwen3_5")
    ModuleReconstructionPatcher(model).unpatch_forward()
    ids = torch.arange(12).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False), plain.generate(ids, max_new_tokens=4, do_sample=False)
    )


def test_a_plan_that_carries_no_state_is_refused_by_a_hybrid():
    class OtherPlan:
        attend = ForestPlan.attend

    model = build("qwen3_5")
    ModuleReconstructionPatcher(model).patch_forward()
    with pytest.raises(UnsupportedModelError, match="qwen3_5 keeps a recurrent state, which a OtherPlan"):
        model.model(input_ids=torch.arange(4).unsqueeze(0), forest=OtherPlan(), use_cache=False)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_cannot_go_on_from_a_held_prefix_in_any_precision(name, dtype):
    """In half precision the tolerance alone would let a state that starts from zero pass."""
    assert not can_stage(ModuleReconstructionPatcher(build(name, dtype)))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "falcon_h1", "lfm2", "gpt_oss", "deepseek_v3"])
def test_bf16_is_no_further_from_float64_than_the_plain_pass(name):
    rows, masks = random_rows(2)
    wide = build(name, torch.bfloat16).to(torch.float64)
    if "experts" in FAMILIES[name].kind:
        wide.set_experts_implementation("eager")
    with torch.no_grad():
        exact, _ = rows_alone(wide, rows, masks)
        plain, _ = rows_alone(build(name, torch.bfloat16), rows, masks)
        shared = ModuleReconstructionPatcher(build(name, torch.bfloat16)).forward_rows(rows, masks).logprobs
    assert (shared - exact).abs().mean() <= 2 * (plain - exact).abs().mean()


class KeepsItsKeywords(GradientCheckpointingLayer):
    """A layer of older transformers: it is given the keywords and calls its convolution without them."""

    def __init__(self):
        super().__init__()
        self.conv1d = torch.nn.Conv1d(3, 3, 4, groups=3, padding=3).double()

    def forward(self, x, **kwargs):
        return torch.nn.functional.silu(self.conv1d(x)[:, :, : x.shape[2]])


@pytest.mark.parametrize("plan_type", [ForestPlan, RowsPlan])
def test_plan_is_kept_at_hand_for_layers_that_do_not_hand_it_on(plan_type, monkeypatch):
    monkeypatch.setattr(hybrid, "KEYWORDS_REACH_FUNCTIONS", False)
    layer = KeepsItsKeywords()
    for _ in range(2):  # the second time changes nothing
        hybrid.join_recurrent_layers(torch.nn.ModuleList([layer]))
    layer = copy.deepcopy(layer)
    forest = build_forest([[1, 2, 3, 4, 5], [1, 2, 6, 7], [1, 2, 6], [8, 9]])
    x = torch.randn(1, 3, forest.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = layer(x, forest=plan_type(forest))
    for b in range(forest.num_rows):
        at = torch.from_numpy(forest.row(b))
        assert (out[:, :, at] - layer(x[:, :, at])).abs().max() < 1e-12
    with pytest.raises(RuntimeError):
        layer(x[0, 0], forest=plan_type(forest))
    assert hybrid._plan_at_hand.get() is None


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_hybrid_whose_layers_do_not_hand_the_plan_on_is_exact_when_it_is_at_hand_and_refused_else(
    is_checkpointed, monkeypatch
):
    stock = Lfm2ShortConv.forward

    def without_plan(self, *args, forest=None, **kwargs):
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Lfm2ShortConv, "forward", without_plan)
    monkeypatch.setattr(Lfm2DecoderLayer, "forward", Lfm2DecoderLayer.forward)  # undone afterwards
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM"):
        ModuleReconstructionPatcher(build("lfm2"))
    monkeypatch.setattr(hybrid, "KEYWORDS_REACH_FUNCTIONS", False)
    model = build("lfm2")
    patcher = ModuleReconstructionPatcher(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    receipt = measure_receipt(patcher, *random_rows(5))
    assert receipt.logprob_max_abs <= 1e-5 and receipt.gradient_rel <= 1e-5


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_latent_attention_runs_on_the_fused_kernel(name, monkeypatch):
    patcher = ModuleReconstructionPatcher(build(name))
    expected = patcher.forward_rows(*random_rows(0)).logprobs
    monkeypatch.setattr(kernels, "_scores", None)  # the matmul kernel cannot run without it
    assert torch.equal(patcher.forward_rows(*random_rows(0)).logprobs, expected)


def test_multimodal_positions_are_refused_in_one_line():
    model = build("qwen3_5")
    ids = torch.arange(8).unsqueeze(0)
    patched = ModuleReconstructionPatcher(model, response_len=4).patch_forward()
    with pytest.raises(InputError, match=r"position_ids has shape \[3, 1, 8\], expected \[1, 8\]"):
        patched(ids, position_ids=torch.arange(8).expand(3, 1, 8))


def test_a_window_that_attention_is_not_told_of_is_refused_though_no_probe_row_is_that_long():
    model = build("qwen2", use_sliding_window=True, sliding_window=400, layer_types=["sliding_attention"] * 2)
    ModuleReconstructionPatcher(model).unpatch_forward()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match=r"Qwen2ForCausalLM .* not exact"):
        ModuleReconstructionPatcher(model)
    assert model.config.sliding_window == 400


LONG = ([np.arange(30), np.append(np.arange(20), 99)], [np.arange(30) >= 10, np.arange(21) >= 10])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_chunk_size": 25}, "a row of 30 tokens exceeds attention_chunk_size=25"),
        ({"floor_scale": 41, "attn_temperature_tuning": True}, "50 packed tokens reach floor_scale=41"),
    ],
)
def test_rules_that_a_row_of_llama4_would_take_from_the_pack_are_refused(options, message):
    config = {**FAMILIES["llama4"].config, "layer_types": ["chunked_attention", "full_attention"], **options}
    torch.manual_seed(0)
    patcher = ModuleReconstructionPatcher(AutoModelForCausalLM.from_config(Llama4TextConfig(**config)).eval())
    rows, masks = [*LONG[0], np.arange(40, 59)], [*LONG[1], np.arange(19) >= 10]
    with pytest.raises(InputError, match=message):
        patcher.forward_rows(rows, masks)
    short = [row[-9:] for row in rows], [mask[-9:] & (np.arange(9) > 0) for mask in masks]
    assert measure_receipt(patcher, *short).logprob_max_abs < 5e-6


@pytest.mark.parametrize(
    ("rope", "accepted", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, [16], "a row of 30 tokens exceeds 25, where dynamic position"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "factor": 4.0},
            [30, 28],
            "rows on both sides of original_max_position_embeddings=25",
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_positions_that_depend_on_the_longest_row_are_refused(rope, accepted, message):
    rope = {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 25}
    config = LlamaConfig(**SIZES | {"max_position_embeddings": 100, "rope_parameters": rope})
    torch.manual_seed(0)
    patcher = ModuleReconstructionPatcher(AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(InputError, match=message):
        patcher.forward_rows(*LONG)
    rows = [np.arange(n) for n in accepted]
    assert measure_receipt(patcher, rows, [np.arange(n) >= 4 for n in accepted]).logprob_max_abs < 5e-6


def test_the_limit_of_longrope_is_found_where_phi3_keeps_it():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "rope_theta": 10000.0}
    sizes = {"max_position_embeddings": 100, "original_max_position_embeddings": 25, "sliding_window": None}
    patcher = ModuleReconstructionPatcher(build("phi3", **sizes, rope_parameters=rope))
    with pytest.raises(InputError, match="original_max_position_embeddings=25"):
        patcher.forward_rows(*LONG)


@pytest.mark.parametrize("name", ROUTER_LOSS)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_router_loss_counts_a_shared_token_once_per_row(name, is_checkpointed):
    """Against the rows one after the other, and against their padded batch, whose pads count for nothing."""
    rows, masks = random_rows(2)
    model = build(name, output_router_logits=True)
    patcher = ModuleReconstructionPatcher(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    shared = patcher.forward_rows(rows, masks).aux_loss
    ours = gradients(model, shared)
    with plain_attention(model):
        alone = plain_rows(patcher, rows, masks).aux_loss
        assert relative(ours, gradients(model, alone)) <= 5e-6
        padded = plain_rows(patcher, rows, masks, padded=True).aux_loss
        assert relative(ours, gradients(model, padded)) <= 5e-6
    torch.testing.assert_close(torch.stack([shared, shared]), torch.stack([alone, padded]), rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", ROUTER_LOSS)
def test_router_loss_of_one_row_is_the_models_own(name):
    model = build(name, output_router_logits=True)
    row = np.arange(3, 20)
    ours = ModuleReconstructionPatcher(model).forward_rows([row], [np.arange(17) > 4]).aux_loss
    own = build(name, output_router_logits=True)(input_ids=torch.from_numpy(row)[None]).aux_loss
    torch.testing.assert_close(ours, own, rtol=1e-6, atol=0)


def test_router_loss_weighs_a_prompt_by_its_rows():
    model = build("qwen3_moe", output_router_logits=True)
    patcher = ModuleReconstructionPatcher(model)
    rows, masks = split(["1 2 3 | 4", "1 2 3 | 5", "1 2 3 | 6", "7 | 8"])
    one, many = (patcher.forward_rows(rows[at], masks[at]).aux_loss for at in (slice(2, 4), slice(None)))
    assert (one - many).abs() > 1e-3


def test_router_loss_is_not_computed_unasked():
    assert ModuleReconstructionPatcher(build("qwen3_moe")).forward_rows(*random_rows(0)).aux_loss is None


@pytest.mark.parametrize("name", NO_ROUTER_LOSS)
def test_family_without_such_a_router_loss_refuses_it_by_name(name):
    with pytest.raises(
        UnsupportedModelError, match=r"ForCausalLM asks for a router .*; set config\.output_router_logits = False"
    ):
        ModuleReconstructionPatcher(build(name, output_router_logits=True))


def test_reentrant_checkpointing_cannot_drop_the_routers_gradient_silently():
    model = build("qwen3_moe", output_router_logits=True)
    patcher = ModuleReconstructionPatcher(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    with pytest.raises(InputError, match="use_reentrant"):
        patcher.forward_rows(*random_rows(0))
