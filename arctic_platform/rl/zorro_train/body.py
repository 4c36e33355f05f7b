"""Where a causal LM of transformers keeps the model that its head sits on."""

from __future__ import annotations

from transformers import PreTrainedModel


def find_body(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head, or the model itself where nothing can be taken apart."""
    candidates = (model.base_model, *model.children())  # Llama 4's prefix names a module that its text model lacks
    return next((body for body in candidates if isinstance(body, PreTrainedModel) and body is not model), model)
