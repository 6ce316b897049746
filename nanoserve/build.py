"""One page that builds an engine: what goes into it is made from top to bottom, each thing once.

    name and options -> checkpoint -> what it says of its model -> tokenizer -> executor -> engine

vLLM's names for options are translated before: see `nanoserve.compat.options.engine_config`.
"""

import logging
from collections.abc import Callable
from functools import partial

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.policy import load_scheduler_class
from nanoserve.models.registry import supported_architectures
from nanoserve.sampling_params import SamplingParams
from nanoserve.text.tokenizer_protocol import Tokenizer
from nanoserve.utils.registry import Registry
from nanoserve.worker.build_executor import device_kind, make_executor
from nanoserve.worker.startup_summary import announce

logger = logging.getLogger(__name__)

# Raises `ValueError` for what a feature cannot do with this model, before any weight is read, and
# returns what adds the feature to an engine. That may have a method `memory`, which returns what a
# second model takes of the same GPU.
PrepareFeature = Callable[[EngineConfig, ModelConfig], Callable[[GuardedEngine], None]]

# Features by the option that switches them on. Extensions are called in this order: a pipeline
# decides which sequences are in a step, then those get draft tokens, and then it is published.
FEATURES: Registry[PrepareFeature] = Registry(
    "feature",
    {
        "pipeline_parallel_size": "nanoserve.features.parallel.pipeline_schedule:prepare_pipeline",
        "speculative_config": "nanoserve.features.speculative.extension:prepare_speculation",
        "kv_events_config": "nanoserve.features.kv_events.publisher:prepare_kv_events",
    },
)


def build_engine(config: EngineConfig) -> GuardedEngine:
    """Load the model that `config` names, ready to take requests.

    The weights come last: whatever can be refused is refused, with a `ValueError`, before they are
    fetched or read. See `nanoserve.llm.LLM` for what that is.
    """
    config = config.for_device(device_kind(config.device))
    load_scheduler_class(config.scheduler_cls)  # raises if it is none
    checkpoint = Checkpoint.open(config.model, config, config.revision)
    model_config = checkpoint.model_config(config, supported_architectures())
    SamplingParams(**model_config.default_sampling)  # raises if the makers recommend nonsense
    tokenizer = load_tokenizer(config, checkpoint)
    if tokenizer is not None and tokenizer.backend.get_vocab_size() > model_config.vocab_size:
        logger.warning("the tokenizer of %s has more tokens than the model", config.model)
    switched_on = config.changed_options()
    features = [
        FEATURES.get(name)(config, model_config) for name in FEATURES.names() if name in switched_on
    ]
    if config.load_format != "dummy":
        checkpoint.fetch_weights()
    # What a feature brings along, such as a draft model, has to fit beside the model's KV cache.
    beside = [feature.memory for feature in features if hasattr(feature, "memory")]
    make = partial(make_executor, model_config=model_config, path=checkpoint.folder, beside=beside)
    engine = GuardedEngine(config, model_config, make(config), tokenizer, make_executor=make)
    for add_to in features:
        add_to(engine)
    announce(engine)
    return engine


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the checkpoint's own, or that of the option `tokenizer`; None if none is wanted."""
    if config.skip_tokenizer_init:
        return None
    from nanoserve.text.tokenizer import Tokenizer  # transformers takes seconds to import

    if config.tokenizer is not None:
        checkpoint = Checkpoint.open(config.tokenizer, config)
    return Tokenizer(checkpoint.source, config.trust_remote_code, config.chat_template)
