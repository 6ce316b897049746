"""Any decoder of transformers with nanoserve's paged attention (`model_impl="transformers"`).

A model of transformers looks up its attention function by name. The function of this module stores
K and V in the KV cache and calls the engine's attention backend; everything else is transformers'
own code. The packed tokens of a step are one row of a batch, with `position_ids`. Masks are not
built, because the backend knows which tokens a query sees.

This is slower than a model of nanoserve's own, whose layers are fused. The linears get the engine's
matrix products, as those of its own models do.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.config_json import architecture_of
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.text_part import name_in_model
from nanoserve.checkpoint.transformers_config import read_settings
from nanoserve.checkpoint.weight_files import Weights, open_weights, weight_files
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.transformers.attention import (
    NAME,
    AttentionStep,
    attention_of,
    register_attention,
)
from nanoserve.models.transformers.check import why_different
from nanoserve.models.transformers.linears import recording_linears, replace_linears
from nanoserve.utils.checks import require, shown

logger = logging.getLogger(__name__)


class _GivenHidden(nn.Module):
    """Takes the place of a base model: returns hidden states that have been computed before.

    So transformers' class computes the logits with whatever it does around its LM head.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.hidden: Tensor | None = None
        self.output_class: Any = None

    @contextmanager
    def returning(self, hidden: Tensor) -> Iterator[None]:
        """Return `hidden` [1, num_rows, hidden_size] within the `with` block."""
        self.hidden = hidden
        try:
            yield
        finally:
            self.hidden = None

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.hidden is not None:
            return self.output_class(last_hidden_state=self.hidden)
        output = self.base(*args, **options)
        self.output_class = type(output)  # classes read different fields of it
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class TransformersForCausalLM(nn.Module):
    """A decoder of transformers, with the interface of nanoserve's models."""

    capturable = False  # its steps have not been captured in CUDA graphs

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        """Build the model without weights; `load_weights` reads them."""
        super().__init__()
        register_attention()
        raw = config.transformers_config
        require(raw is not None, "set model_impl='transformers' for this model")
        self.config, self.context = config, context
        self.tied_tensors: dict[str, str] = {}  # transformers ties them
        self.name = architecture_of(raw)
        self.settings = read_settings(raw)
        self._use(self._build(torch.device("meta")))

    def _build(self, device: torch.device) -> PreTrainedModel:
        """Return the model with transformers' random weights; on "meta", without memory."""
        with device:
            return _model_class(self.name)._from_config(
                self.settings, dtype=self.context.dtype, attn_implementation=NAME
            )

    def _use(self, model: PreTrainedModel) -> None:
        """Take `model`, in evaluation mode, as the model to compute with."""
        decoder = model.get_decoder()
        if isinstance(decoder, nn.Linear):  # of ModernBERT: the LM head, which is called so
            decoder = model.base_model
        place = next(name for name, module in model.named_modules() if module is decoder)
        require(
            place != "",
            f"{self.name} does not run through transformers: its layers and its LM head are one "
            "module",
        )
        self.model = model.eval().requires_grad_(False)
        self.base = _GivenHidden(decoder)
        model.set_submodule(place, self.base)

    def load_weights(self, source: Weights, load_format: str) -> None:
        """Read all weights with transformers, and compare the results with transformers' own.

        Raises `ValueError` for tensors that are missing, not used, or of another shape, and if the
        logits are not those of transformers' attention.
        """
        self._use(self._load(source, load_format))
        with recording_linears(self.model) as called:
            problem = why_different(self)
        require(problem is None, f"{self.name} does not run through transformers: {problem}")
        method = self.context.linear_method
        if method is None:
            return
        replace_linears(self.model, called, method, self.name)
        problem = why_different(self)
        if problem is not None:  # its class uses the weight of a linear in another way
            is_quantized = hasattr(method, "to_integers")
            require(not is_quantized, f"{self.name} cannot be quantized: {problem}")
            logger.warning("%s keeps torch's matrix products: %s", self.name, problem)
            self._use(self._load(source, load_format))

    def _load(self, source: Weights, load_format: str) -> PreTrainedModel:
        return self._build(self.context.device) if load_format == "dummy" else self._read(source)

    def _read(self, source: Weights) -> PreTrainedModel:
        folder, state = (source, None) if isinstance(source, Path) else (None, _tensors(source))
        read: Any = _model_class(self.name).from_pretrained(
            folder,
            config=self.settings,
            state_dict=state,
            dtype=self.context.dtype,
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=None if folder is None else True,
            ignore_mismatched_sizes=True,  # they are in `info`
            output_loading_info=True,
        )
        model, info = read
        problems = {name: sorted(map(str, found)) for name, found in info.items() if found}
        require(
            not problems,
            f"the weights in {source} do not match {self.name}: {shown(problems)}",
        )
        return model.to(self.context.device)

    def forward(
        self, input_ids: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of int32 input_ids [num_tokens]."""
        return self.run(AttentionStep(self.context.attention, kv_caches, metadata), input_ids)

    def run(self, step: AttentionStep, input_ids: Tensor) -> Tensor:
        """Compute the hidden states of a step, which records the windows of its layers."""
        with attention_of(step):
            output = self.base(
                input_ids=input_ids[None].long(),
                position_ids=step.metadata.positions[None].long(),
                attention_mask=None,
                use_cache=False,
            )
        return output[0][0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, [num_rows, hidden_size] -> [num_rows, vocab_size]."""
        with self.base.returning(hidden[None]):
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return self.model(input_ids=ids, use_cache=False).logits[0]


def _model_class(name: str) -> type[PreTrainedModel]:
    return getattr(transformers, name)


def _tensors(source: Weights) -> dict[str, Tensor]:
    """Return the tensors of a trainer, or of the text model in a multimodal checkpoint."""
    tensors: dict[str, Tensor] = {}
    for part in weight_files(source):
        with open_weights(part) as opened:
            for stored in opened.offset_keys():
                name = name_in_model(source, stored)
                if name is not None:
                    tensors[name] = opened.get_tensor(stored)
    return tensors
