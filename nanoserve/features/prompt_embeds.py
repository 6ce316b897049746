"""Prompts that are embeddings, or have some between their token ids (`enable_prompt_embeds=True`).

    LLM.generate({"prompt_embeds": tensor})        --+
    {"prompt_token_ids", "prompt_embeds_pieces"}   --+-- PromptEmbedsReader --> Sequence

The sequence has placeholder ids, and keeps the embeddings until it ends, since it may be preempted
and computed again. Each step takes the rows of the tokens that it computes: `StepEmbeds`, an input
of the step. The prefix cache compares the hashes of the rows: see `nanoserve.engine.prompt_embeds`.
"""

import inspect
from typing import TYPE_CHECKING

import numpy as np

from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.plan import Plan
from nanoserve.engine.prompt_embeds import StepEmbeds
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine


class PromptEmbedsInput(Extension):
    """Gives each step the embeddings of the prompt tokens that it computes."""

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        indices: list[np.ndarray] = []
        contents: list[np.ndarray] = []
        first = 0  # token of the row in the batch
        for row in plan.rows:
            embeds = row.seq.prompt_embeds
            if embeds is not None and row.start < row.seq.num_prompt_tokens:
                positions, rows = embeds.between(row.start, row.start + row.n)
                if len(positions):
                    indices.append(positions - row.start + first)
                    contents.append(rows)
            first += row.n
        if indices:
            inputs.embeds = StepEmbeds(np.concatenate(indices), np.concatenate(contents))


def prepare_prompt_embeds(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return the feature of an engine that takes prompt embeddings.

    Raises `ValueError`, before any weight is read, for a model whose class does not take them, and
    for options that need the token ids of prompts.
    """
    name = model_config.checkpoint_architecture
    option = "enable_prompt_embeds=True"
    require(
        model_config.pooling is None,
        f"{option} needs runner='generate': an engine that pools takes text and token ids",
    )
    own = model_class(model_config.architecture)
    layers = getattr(own, "model_class", None)
    takes_them = all(
        "inputs_embeds" in inspect.signature(each.forward).parameters
        for each in (own, layers)
        if each is not None
    )
    require(
        takes_them and hasattr(layers, "embed"),
        f"{option} is not supported by {name}: `forward` of its class must take `inputs_embeds`, "
        f"as nanoserve.models.qwen3.Qwen3ForCausalLM does",
    )
    drafts, connector = config.speculative_config, config.kv_connector
    require(
        drafts is None or drafts.method != "draft_model",
        f"{option} does not support method='draft_model' of speculative_config, which computes the "
        f"prompt from its token ids: use 'ngram', 'suffix' or 'hidden_head'",
    )
    require(
        connector is None or connector.kv_connector != "socket",
        f"{option} does not support kv_connector='socket': the prefill engine is sent token ids",
    )
    stages = config.pipeline_parallel_size
    require(
        stages == 1,
        f"{option} does not support pipeline_parallel_size={stages}: rank 0, which has the "
        f"embeddings, is in the last stage; use tensor_parallel_size",
    )

    def add_to(engine: "GuardedEngine") -> None:
        engine.add_extension(PromptEmbedsInput())

    return PreparedFeature(add_to)
