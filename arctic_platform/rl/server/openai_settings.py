"""What a sampling server is told of its model."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from arctic_platform.rl.config import StrictModel


class SamplingSettings(StrictModel):
    """One model to sample from. Raises ConfigError for a value out of range."""

    model: str = Field(min_length=1, description="A Hugging Face folder, or a hub id.")
    served_name: str | None = Field(None, min_length=1, description="Name that clients ask for; none: the model's.")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="Type of the weights.")
    device: str = Field("cpu", description="cpu, cuda or cuda:<index>.", pattern=r"^(cpu|cuda(:\d+)?)$")
    max_batch_rows: int = Field(64, ge=1, description="Most rollouts decoded at the same time.")
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="Tokens whose keys and values are kept, of running and finished rollouts; none: 4 GiB."
    )
    prefix_cache_policy: Literal["reset", "keep", "version"] = Field(
        "reset", description="New weights: forget cached prefixes, go on using them, or keep them for their version."
    )
    prefill_chunk_tokens: int = Field(512, ge=1, description="Prompt tokens between two decode steps.")
    chat_template: Path | None = Field(None, description="Jinja file, in place of the model's own chat template.")
    weights_root: Path | None = Field(
        None, description="Take new weights from folders below this one; none: take none."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it; the first is the name in /v1/models, as vLLM has it: the model as it was given."""
        return (self.served_name,) if self.served_name else (self.model, Path(self.model).name)
