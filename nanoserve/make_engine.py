"""From a name and options to an engine: its checkpoint, its tokenizer, its executor, the loop."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import Executor
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.policy import load_scheduler_class
from nanoserve.models.registry import supported_architectures
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.device import device_kind, make_executor

logger = logging.getLogger(__name__)


def make_engine(model: str | Path, options: Mapping[str, Any]) -> GuardedEngine:
    """`options` are the fields of `EngineConfig`; see `nanoserve.llm.LLM` for what is raised.

    The weights come last: whatever can be refused is refused before they are fetched or read.
    """
    config = EngineConfig.from_options(model, **options)
    config = config.for_device(device_kind(config.device))
    load_scheduler_class(config.scheduler_cls)  # raises if it is none
    checkpoint = Checkpoint.find(model, config, config.revision)
    model_config = checkpoint.model_config(supported_architectures())
    SamplingParams(**model_config.default_sampling)  # raises if the makers recommend nonsense
    tokenizer = None
    if not config.skip_tokenizer_init:
        from nanoserve.tokenizer import Tokenizer

        source = Checkpoint.find(config.tokenizer, config) if config.tokenizer else checkpoint
        tokenizer = Tokenizer.for_config(source.folder, config)
        if tokenizer.backend.get_vocab_size() > model_config.vocab_size:
            logger.warning("the tokenizer of %s has more tokens than the model", source.name)
    make_proposer: Any = None
    if config.speculative_config is not None:
        from nanoserve.speculative.methods import prepare_proposer

        make_proposer = prepare_proposer(config, model_config)
    checkpoint.fetch_weights()

    def make(config: EngineConfig) -> Executor:
        return make_executor(config, model_config, checkpoint.folder)

    engine = GuardedEngine(config, model_config, make(config), tokenizer, make_executor=make)
    if config.pipeline_parallel_size > 1:
        from nanoserve.engine.pipeline import PipelineSchedule

        engine.add_extension(PipelineSchedule(engine))
    if make_proposer is not None:
        from nanoserve.speculative.extension import Speculation

        engine.add_extension(Speculation(engine, make_proposer))
    if config.kv_events_config is not None and config.kv_events_config.is_active:
        from nanoserve.kv_events.publisher import make_kv_events

        kv_events = make_kv_events(config.kv_events_config, engine.scheduler.block_manager)
        engine.add_extension(kv_events)
    if not config.disable_log_stats:
        from nanoserve.drop_in.metrics import start

        start(engine)
    if logger.isEnabledFor(logging.INFO) or (sys.stderr is not None and sys.stderr.isatty()):
        from nanoserve.announce import announce

        announce(engine)
    return engine
