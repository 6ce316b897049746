"""Builds an engine: each of its parts is created once, in this order.

    name and options -> checkpoint -> model configuration -> tokenizer -> executor -> engine

vLLM's option names are translated first: see `nanoserve.compat.options.engine_config`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.extension import PreparedFeature
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.policy import load_scheduler_class
from nanoserve.features.recurrent_options import supported_options
from nanoserve.models.registry import supported_architectures
from nanoserve.sampling_params import SamplingParams
from nanoserve.text.detokenizer import Tokenizer
from nanoserve.utils.registry import Registry
from nanoserve.worker.build_executor import device_kind, make_executor
from nanoserve.worker.startup_summary import announce

logger = logging.getLogger(__name__)

# Raises `ValueError` if a feature does not support this model, before any weight is read.
PrepareFeature = Callable[[EngineConfig, ModelConfig], PreparedFeature]

# Features by the option that enables them. Extensions are called in this order: a pipeline decides
# which sequences are in a step, then these get draft tokens, then KV events are published.
FEATURES: Registry[PrepareFeature] = Registry(
    "feature",
    {
        "pipeline_parallel_size": "nanoserve.features.parallel.pipeline_schedule:prepare_pipeline",
        "enable_prompt_embeds": "nanoserve.features.prompt_embeds:prepare_prompt_embeds",
        "speculative_config": "nanoserve.features.speculative.extension:prepare_speculation",
        "enable_lora": "nanoserve.features.lora.prepare:prepare_lora",
        "pooler_config": "nanoserve.features.pooling.prepare:prepare_pooling",
        "kv_offloading_size": "nanoserve.features.kv_transfer.prepare:prepare_host_tier",
        "kv_offloading_path": "nanoserve.features.kv_transfer.prepare:prepare_connector",
        "kv_transfer_config": "nanoserve.features.kv_transfer.prepare:prepare_connector",
        "kv_events_config": "nanoserve.features.kv_events.publisher:prepare_kv_events",
        "enable_return_routed_experts": "nanoserve.features.routed_experts:prepare_routed_experts",
        "otlp_traces_endpoint": "nanoserve.features.request_spans:prepare_request_spans",
    },
)


def build_engine(config: EngineConfig) -> GuardedEngine:
    """Load the model that `config` names, and return an engine that accepts requests.

    The weights are fetched and read last: everything that can be rejected is rejected before, with
    a `ValueError`. See `nanoserve.llm.LLM` for the cases.
    """
    config = config.for_device(device_kind(config.device))
    load_scheduler_class(config.scheduler_cls)  # raises for an invalid class
    checkpoint = Checkpoint.open(config.model, config, config.revision)
    model_config = checkpoint.model_config(config, supported_architectures())
    config = supported_options(config, model_config)
    if model_config.pooling is not None:  # perhaps chosen by runner="auto"
        config = replace(config, runner="pooling", pooler_config=config.pooler_config or {})
    SamplingParams(**model_config.default_sampling)  # raises if recommended values are invalid
    if model_config.multimodal_architecture is not None:
        logger.warning(
            "%s is a %s: only its text part is loaded%s",
            config.model,
            model_config.multimodal_architecture,
            "" if config.enable_prompt_embeds else ", and images or sound are not supported",
        )
    if model_config.transformers_config is not None:
        logger.warning(
            "%s runs through transformers, with nanoserve's attention: slower than a model of "
            "nanoserve's own, because its layers are not fused",
            model_config.checkpoint_architecture,
        )
    tokenizer = load_tokenizer(config, checkpoint)
    if tokenizer is not None and tokenizer.backend.get_vocab_size() > model_config.vocab_size:
        logger.warning(
            "the tokenizer of %s has more tokens than the model; prompts with the extra tokens are "
            "rejected",
            config.model,
        )
    switched_on = config.changed_options()
    features = [
        FEATURES.get(name)(config, model_config) for name in FEATURES.names() if name in switched_on
    ]
    if config.load_format != "dummy":
        checkpoint.fetch_weights()
    # A second model, such as a draft model, has to fit next to the KV cache.
    second_models = [
        each.second_model_memory for each in features if each.second_model_memory is not None
    ]
    make = partial(
        make_executor,
        model_config=model_config,
        path=checkpoint.folder,
        second_models=second_models,
    )
    engine = GuardedEngine(config, model_config, make(config), tokenizer, make_executor=make)
    for feature in features:
        feature.add_to(engine)
    announce(engine)
    return engine


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer of the checkpoint, or of the option `tokenizer`.

    Returns None if `skip_tokenizer_init` is set.
    """
    if config.skip_tokenizer_init:
        return None
    from nanoserve.text.tokenizer import Tokenizer  # transformers takes seconds to import

    if config.tokenizer is not None:
        checkpoint = Checkpoint.open(config.tokenizer, config)
    return Tokenizer(checkpoint.source, config.trust_remote_code, config.chat_template)
