"""The proposers by name."""

from collections.abc import Callable

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import Executor
from nanoserve.engine.scheduler import Scheduler
from nanoserve.speculative.proposer import Proposer

# Makes a proposer, with the executor and the scheduler that it is for.
MakeProposer = Callable[[Executor, Scheduler], Proposer]


def prepare_proposer(config: EngineConfig, model_config: ModelConfig) -> MakeProposer:
    """Return what makes the configured proposer. Raises `ValueError` before any weight is read."""
    speculative = config.speculative_config
    if speculative.method == "suffix":
        from nanoserve.speculative.suffix import SuffixProposer

        return lambda executor, scheduler: SuffixProposer(speculative)
    if speculative.method == "draft_model":
        from nanoserve.speculative.draft_model import prepare_draft_model

        return prepare_draft_model(config, model_config)
    if speculative.method == "hidden_head":
        from nanoserve.speculative.head_proposer import prepare_hidden_head

        return prepare_hidden_head(config, model_config)
    from nanoserve.speculative.ngram import NgramProposer

    return lambda executor, scheduler: NgramProposer(*speculative.lookup)
