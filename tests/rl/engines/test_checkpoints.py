"""Checkpoints: what is in one, that a resumed run goes on exactly, and what disks and crashes do to them."""

import contextlib
import json
import os
import resource
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from arctic_platform.errors import CheckpointError, ConfigError, InputError
from arctic_platform.rl.engines import folders
from arctic_platform.rl.engines.checkpoints import find_checkpoint
from arctic_platform.rl.engines.folders import Draft, writing
from arctic_platform.rl.engines.models import load_model, tiny_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.training_files import TensorFiles, random_state, restore_random, write_tensors
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.engines.test_torch_train import assert_untouched, engine, everything, weights


def train(trainer: TorchTrainEngine, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        losses.append(trainer.fwd_bwd(grouped_batch(seed)).metrics["loss"])
        losses.append(trainer.step().metrics["grad_norm"])
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    settings = {"dtype": dtype, "optimizer": {"lr": 1e-2, "schedule": "cosine", "total_steps": 6, "warmup_steps": 1}}
    whole, first, second = engine(**settings), engine(**settings), engine(**settings)
    expected = train(whole, range(6))
    train(first, range(3))
    first.save_checkpoint(str(tmp_path / "c"), {"position": 3})
    response = second.load_checkpoint(str(tmp_path / "c"))
    assert (response.step, response.client_state) == (3, {"position": 3})
    assert train(second, range(3, 6)) == expected[6:]
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(second).items())


def test_checkpoint_loads_with_plain_from_pretrained(tmp_path: Path) -> None:
    trainer, batch = engine(), grouped_batch()
    train(trainer, range(1))
    path = trainer.save_checkpoint(str(tmp_path / "c")).path
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config._attn_implementation != "arctic_forest"
    assert all(torch.equal(param, weights(trainer)[name]) for name, param in model.named_parameters())
    assert TorchTrainEngine(config(model=path)).log_probs(batch).logprobs == trainer.log_probs(batch).logprobs


def test_export_is_a_model_folder_with_its_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("not part of a model")
    trainer = engine(model=str(source))
    exported = Path(trainer.export_model(str(tmp_path / "out")))
    trainer.export_model(str(exported))
    assert {file.name for file in exported.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not (exported / "notes.txt").exists()
    assert load_model(str(exported)).num_parameters() == trainer.model.num_parameters()


def test_newest_checkpoint_is_found_and_old_ones_of_this_run_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    other = engine(checkpoint_path=str(folder))
    other.save_checkpoint()
    (folder / "step-notes").mkdir()
    trainer = engine(checkpoint_path=str(folder), keep_checkpoints=2)
    for _ in range(4):
        train(trainer, range(1))
        trainer.save_checkpoint()
    assert sorted(file.name for file in folder.iterdir()) == ["step-000000", "step-000003", "step-000004", "step-notes"]
    resumed = engine(checkpoint_path=str(folder), keep_checkpoints=2)
    assert resumed.load_checkpoint().step == 4
    train(resumed, range(1))
    resumed.save_checkpoint()
    assert sorted(file.name for file in folder.iterdir()) == ["step-000000", "step-000004", "step-000005", "step-notes"]


def test_changed_optimizer_settings_count_after_a_resume(tmp_path: Path) -> None:
    first = engine()
    train(first, range(1))
    first.save_checkpoint(str(tmp_path / "c"))
    second = engine(optimizer={"lr": 1e-3, "weight_decay": 0.3})
    second.load_checkpoint(str(tmp_path / "c"))
    assert second.optimizer.adamw.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"])
@pytest.mark.parametrize("damage", ["delete", "cut"])
def test_incomplete_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, name: str, damage: str) -> None:
    trainer = engine()
    folder = Path(trainer.save_checkpoint(str(tmp_path / "c")).path)
    if damage == "delete":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    train(trainer, range(1))
    before = everything(trainer)
    with pytest.raises(CheckpointError) as caught:
        trainer.load_checkpoint(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_untouched(trainer, before)


def test_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    other = tiny_model()
    other.resize_token_embeddings(128)
    TorchTrainEngine(config(), other).save_checkpoint(str(tmp_path / "c"))
    trainer = engine()
    before = everything(trainer)
    with pytest.raises(CheckpointError, match="is of another model"):
        trainer.load_checkpoint(str(tmp_path / "c"))
    assert_untouched(trainer, before)


def test_checkpoint_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write"):
        engine().save_checkpoint(str(tmp_path / "file" / "c"))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@contextlib.contextmanager
def full_disk(max_file_bytes: int) -> Iterator[None]:
    """No file can grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Full at the first file, in the middle of the weights, and in the optimizer's state, which is twice as large.
@pytest.mark.parametrize("max_file_bytes", [0, 5000, 300_000, 600_000])
def test_a_full_disk_keeps_the_checkpoint_before_and_the_training(tmp_path: Path, max_file_bytes: int) -> None:
    trainer, whole = engine(), engine()
    trainer.save_checkpoint(str(tmp_path / "c"), {"n": 1})
    expected = train(whole, range(2))
    losses = train(trainer, range(1))
    with (
        full_disk(max_file_bytes),
        pytest.raises(CheckpointError, match="free space or choose another folder") as error,
    ):
        trainer.save_checkpoint(str(tmp_path / "c"), {"n": 2})
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    assert losses + train(trainer, range(1, 2)) == expected
    trainer.save_checkpoint(str(tmp_path / "d"))
    assert engine().load_checkpoint(str(tmp_path / "c")).client_state == {"n": 1}


def test_folder_with_other_content_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for write in (engine().save_checkpoint, engine().export_model):
        with pytest.raises(CheckpointError, match=r"already holds 'thesis\.tex'"):
            write(str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_checkpoint_needs_a_place_and_no_pending_gradients(tmp_path: Path) -> None:
    trainer = engine()
    with pytest.raises(ConfigError, match="checkpoint_path"):
        trainer.save_checkpoint()
    with pytest.raises(ConfigError, match="checkpoint_path"):
        trainer.load_checkpoint()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        trainer.load_checkpoint(str(tmp_path))
    trainer.fwd_bwd(grouped_batch())
    with pytest.raises(InputError, match=r"call step\(\)"):
        trainer.save_checkpoint(str(tmp_path / "c"))
    with pytest.raises(InputError, match="JSON values only"):
        trainer.save_checkpoint(str(tmp_path / "c"), {"now": object()})
    assert not (tmp_path / "c").exists()


# --- what is in one


def test_a_checkpoint_holds_nothing_that_runs_code_when_it_is_read(tmp_path: Path) -> None:
    trainer = engine(dtype="bfloat16")
    train(trainer, range(1))
    folder = Path(trainer.save_checkpoint(str(tmp_path / "c")).path)
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}
    names = TensorFiles(folder, "optimizer").specs
    trained = [name for name, _ in trainer.model.named_parameters()]
    assert names.keys() == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq", "master") for name in trained}
    assert {spec.dtype for spec in names.values()} == {"float32"}
    assert {spec.dtype for spec in TensorFiles(folder, "model").specs.values()} == {"bfloat16"}


def test_weights_in_shards_load_with_plain_from_pretrained(tmp_path: Path) -> None:
    model = tiny_model()
    with writing(tmp_path / "c") as draft:
        write_tensors(draft, "model", model.state_dict().items(), shard_bytes=60_000)
        model.config.save_pretrained(draft.part)
    files = sorted(file.name for file in (tmp_path / "c").glob("model-*"))
    assert len(files) > 2
    assert files[0].endswith(f"-of-{len(files):05d}.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c").state_dict()
    read = TensorFiles(tmp_path / "c", "model")
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, read.read(name)) for name, value in model.state_dict().items())
    assert read.read("no such") is None


def test_no_more_than_one_shard_is_held_while_writing(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []
    most = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for at in range(20):
            tensor = torch.full((1000,), float(at))
            alive.append(weakref.ref(tensor))
            yield f"t{at}", tensor
            del tensor
            most.append(sum(ref() is not None for ref in alive))

    with writing(tmp_path / "c") as draft:
        write_tensors(draft, "model", tensors(), shard_bytes=16_000)
    assert max(most) <= 5
    assert torch.equal(TensorFiles(tmp_path / "c", "model").read("t19"), torch.full((1000,), 19.0))


class Reversed:
    """A conversion that gives nothing before the end, and then fails or not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.held: list[tuple[str, torch.Tensor]] = []
        self.error = error

    def convert(self, name: str, tensor: torch.Tensor) -> tuple:
        self.held.append((f"new.{name}", tensor))
        return ()

    def finish(self) -> list[tuple[str, torch.Tensor]]:
        if self.error is not None:
            raise self.error
        return self.held[::-1]


def test_tensors_may_be_converted_while_they_are_written(tmp_path: Path) -> None:
    with writing(tmp_path / "c") as draft:
        write_tensors(draft, "model", [("a", torch.ones(2)), ("b", torch.zeros(3))], conversion=Reversed())
    assert TensorFiles(tmp_path / "c", "model").specs.keys() == {"new.a", "new.b"}


def test_what_fails_while_writing_does_not_stop_the_gathering(tmp_path: Path) -> None:
    gathered = []
    with pytest.raises(KeyError, match="of ours"), writing(tmp_path / "c") as draft:
        draft.attempt(lambda: {}["of ours"])
        write_tensors(draft, "model", ((gathered.append(at) or f"{at}", torch.ones(2)) for at in range(3)))
    assert gathered == [0, 1, 2]
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "c") as draft:
        write_tensors(draft, "model", [("a", torch.ones(2))], conversion=Reversed(ZeroDivisionError()))
    assert not list(tmp_path.iterdir())


def mixture() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, tie_word_embeddings=False, **sizes, **experts))


@pytest.mark.parametrize("build", [tiny_model, mixture])
def test_an_exported_model_is_what_transformers_itself_would_write(
    tmp_path: Path, build: Callable[[], PreTrainedModel]
) -> None:
    model = build()
    model.save_pretrained(tmp_path / "theirs")
    TorchTrainEngine(config(), model).export_model(str(tmp_path / "ours"))
    ours, theirs = (TensorFiles(tmp_path / side, "model") for side in ("ours", "theirs"))
    assert ours.specs == theirs.specs
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.specs)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads(
            (tmp_path / "theirs" / file).read_text()
        )


def test_a_mixture_resumes_and_its_checkpoint_loads_with_plain_from_pretrained(tmp_path: Path) -> None:
    first, second = (TorchTrainEngine(config(), mixture()) for _ in range(2))
    train(first, range(1))
    path = first.save_checkpoint(str(tmp_path / "c")).path
    second.load_checkpoint(path)
    assert train(second, range(1, 3)) == train(first, range(1, 3))
    again = TorchTrainEngine(config(), AutoModelForCausalLM.from_pretrained(path))
    again.load_checkpoint(path)
    assert_untouched(again, everything(again))


# --- random state


def test_random_state_goes_on_where_it_was(tmp_path: Path) -> None:
    trainer = engine()
    torch.manual_seed(5)
    trainer.save_checkpoint(str(tmp_path / "c"))
    expected = torch.rand(3)
    trainer.load_checkpoint(str(tmp_path / "c"))
    assert torch.equal(torch.rand(3), expected)


def test_another_number_of_ranks_draws_from_seed_step_and_rank(tmp_path: Path) -> None:
    files = TensorFiles(tmp_path, "random")
    drawn = {}
    for rank, step, seed in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (0, 1, 0)]:
        restore_random(files, "cpu", rank, is_same_world=False, seed=seed, step=step)
        found = random_state("cpu")["cpu"]
        assert torch.equal(drawn.setdefault((rank, step, seed), found), found)
    assert len({bytes(state.numpy()) for state in drawn.values()}) == 4


# --- damage


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "config.json"])
def test_one_flipped_bit_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    trainer = engine()
    train(trainer, range(1))
    folder = Path(trainer.save_checkpoint(str(tmp_path / "c")).path)
    data = bytearray((folder / name).read_bytes())
    data[-40] ^= 1
    (folder / name).write_bytes(data)
    before = everything(trainer)
    with pytest.raises(CheckpointError, match=f"is damaged: the bytes of {name} are not those written"):
        trainer.load_checkpoint(str(folder))
    assert_untouched(trainer, before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"format": 1, "step": 3}', "has checkpoint format 1, this version reads 2"),
        ('{"format": 2, "step": 3}', "trainer.json is damaged"),
        ("[]", "trainer.json is missing or damaged"),
        ("", "trainer.json is missing or damaged"),
    ],
)
def test_a_damaged_index_or_one_of_another_format_is_said(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match=says) as error:
        engine().load_checkpoint(str(tmp_path))
    assert "\n" not in str(error.value)


def test_settings_that_a_job_must_have_alike_are_named(tmp_path: Path) -> None:
    path = engine().save_checkpoint(str(tmp_path / "c")).path
    half = engine(dtype="bfloat16")
    before = everything(half)
    with pytest.raises(CheckpointError, match="was written with dtype='float32', this job has dtype='bfloat16'"):
        half.load_checkpoint(path)
    assert_untouched(half, before)
    other = TorchTrainEngine(config(), mixture())
    with pytest.raises(CheckpointError, match="is of another model: a 'llama', while this job trains a 'qwen3_moe'"):
        other.load_checkpoint(path)


# --- folders


def test_retention_keeps_what_it_did_not_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = engine(checkpoint_path=str(tmp_path), keep_checkpoints=1)
    trainer.save_checkpoint()
    (tmp_path / "step-000000" / "notes.md").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-x").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        train(trainer, range(1))
        trainer.save_checkpoint()
    found = sorted(file.name for file in tmp_path.iterdir())
    assert found == ["elsewhere", "step-000000", "step-000002", "step-x"]
    assert "step-000000 is kept: it holds 'notes.md', which was not written with it" in caplog.text


def test_a_model_folder_is_not_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"already holds 'config\.json'"):
        engine().save_checkpoint(str(tmp_path / "model"))
    (tmp_path / "empty").mkdir()
    assert engine().save_checkpoint(str(tmp_path / "empty")).step == 0


def test_a_link_to_a_folder_stays_and_the_folder_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for number in range(2):
        engine().save_checkpoint(str(tmp_path / "link"), {"n": number})
    assert (tmp_path / "link").is_symlink()
    assert engine().load_checkpoint(str(tmp_path / "real")).client_state == {"n": 1}


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    for call in (engine().save_checkpoint, engine().export_model, engine().load_checkpoint):
        with pytest.raises(CheckpointError, match=r"c is a file; \w+"):
            call(str(tmp_path / "c"))
    assert (tmp_path / "c").read_text() == "a file"


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """As seen by a user who may read and not write, also where the tests are root's."""
    user = os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_read_only_folder_is_named_read_and_left_as_it_is(tmp_path: Path, shared_folder: Path) -> None:
    trainer = engine(checkpoint_path=str(shared_folder), keep_checkpoints=1)
    trainer.save_checkpoint()
    train(trainer, range(1))
    with read_only(shared_folder):
        with pytest.raises(CheckpointError, match=r"cannot write .*: Permission denied; free space or choose another"):
            trainer.save_checkpoint()
        assert trainer.load_checkpoint().step == 0
    assert [file.name for file in shared_folder.iterdir()] == ["step-000000"]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "checkpoints").mkdir()
        yield Path(name) / "checkpoints"


def test_a_folder_that_vanished_is_made_again_and_one_that_vanishes_is_said(tmp_path: Path) -> None:
    trainer = engine(checkpoint_path=str(tmp_path / "a" / "b"))
    assert Path(trainer.save_checkpoint().path).is_dir()
    draft = Draft(tmp_path / "c" / "d")
    draft.begin()
    draft.part.rmdir()
    draft.part.parent.rmdir()
    draft.attempt(lambda: (draft.part / "file").write_text("x"))
    with pytest.raises(CheckpointError, match=r"cannot write .*: No such file or directory"):
        draft.put_in_place()
    draft.close()


def put(path: Path, text: str) -> None:
    """Replace a folder of two files."""
    with writing(path) as draft:
        draft.attempt(lambda: (draft.part / "trainer.json").write_text(text))
        draft.attempt(lambda: (draft.part / "other").write_text(text))


def crashing_at(event: int, work: Callable[..., None], *args: object) -> bool:
    """Run it in a fork that dies, as by SIGKILL, just before its file event of this number; whether it came so far."""
    child = os.fork()
    if child == 0:
        left = [event]

        def hook(name: str, arguments: tuple) -> None:
            if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock"):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        sys.addaudithook(hook)
        work(*args)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_crash_at_any_moment_leaves_the_old_or_the_new_folder_and_the_next_write_tidies_up(tmp_path: Path) -> None:
    seen = []
    for event in range(200):
        home = tmp_path / str(event)
        put(home / "c", "old")
        if not crashing_at(event, put, home / "c", "new"):
            break
        found = find_checkpoint(home / "c")
        texts = {(found / name).read_text() for name in ("trainer.json", "other")}
        assert texts in ({"old"}, {"new"})
        seen.append((texts.pop(), found.name == "c"))
        put(home / "d", "next")
        assert sorted(file.name for file in home.iterdir()) == ["c", "d"]
        assert {(home / "c" / name).read_text() for name in ("trainer.json", "other")} in ({"old"}, {"new"})
    else:
        raise AssertionError("it never came to its end")
    assert set(seen) == {("old", True), ("old", False), ("new", True)}


def test_a_crash_in_a_deletion_leaves_the_folder_or_nothing(tmp_path: Path) -> None:
    for event in range(50):
        home = tmp_path / str(event)
        put(home / "c", "old")
        if not crashing_at(event, folders.remove, home / "c"):
            break
        assert not (home / "c").exists() or {file.name for file in (home / "c").iterdir()} == {"trainer.json", "other"}
        put(home / "d", "next")
        assert [file.name for file in home.iterdir() if file.name.startswith(".")] == []
    else:
        raise AssertionError("it never came to its end")


def test_only_leftovers_of_our_own_form_are_tidied_and_none_that_is_in_use(tmp_path: Path) -> None:
    living = Draft(tmp_path / "living")
    living.begin()
    names = [".c.part", ".c.arctic-12345678.part.txt", "c.arctic-12345678.part", ".c.arctic-1234567x.part"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".file.arctic-12345678.part").write_text("a file")
    (tmp_path / ".link.arctic-12345678.part").symlink_to(tmp_path / ".c.part")
    (tmp_path / ".dead.arctic-12345678.part").mkdir()
    before = {file.name for file in tmp_path.iterdir()}
    put(tmp_path / "d", "next")
    assert {file.name for file in tmp_path.iterdir()} == before - {".dead.arctic-12345678.part"} | {"d"}
    living.put_in_place()
    living.close()
    assert (tmp_path / "living").is_dir()


def test_the_newest_step_is_found_where_a_crash_took_its_name_away(tmp_path: Path) -> None:
    trainer = engine(checkpoint_path=str(tmp_path))
    trainer.save_checkpoint(client_state={"n": 0})
    train(trainer, range(1))
    trainer.save_checkpoint(client_state={"n": 1})
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.arctic-0123abcd.old")
    assert engine(checkpoint_path=str(tmp_path)).load_checkpoint().client_state == {"n": 1}
    train(trainer, range(1))
    trainer.save_checkpoint()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000000", "step-000001", "step-000002"]
