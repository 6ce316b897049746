"""Methods of vLLM's `LLMEngine` besides adding, aborting and stepping."""

from typing import TYPE_CHECKING, Any

from nanoserve.utils.checks import attribute_error, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self

    from nanoserve.checkpoint.model_config import ModelConfig

# What to use instead of others of its attributes. It is here and not in `nanoserve.compat`, which
# the engine does not import.
_ELSEWHERE = {
    **dict.fromkeys(
        ("vllm_config", "scheduler_config", "parallel_config", "device_config", "get_vllm_config"),
        "llm.engine.config has all options",
    ),
    **dict.fromkeys(
        ("lora_config", "add_lora", "remove_lora", "list_loras"), "no adapters are run"
    ),
    **dict.fromkeys(
        ("start_profile", "stop_profile"),
        "trace='run.jsonl' records every step, and torch.profiler profiles a program",
    ),
    **dict.fromkeys(("collective_rpc", "apply_model"), "no function of yours runs in the workers"),
    **dict.fromkeys(
        ("model_executor", "driver_worker", "model_runner", "engine_core"),
        "with one process, llm.engine.executor.model is the model, to look at: most weights are "
        "kept in other forms",
    ),
    "cache_config": "llm.engine.config.block_size, and llm.engine.executor.num_kv_blocks",
    "max_model_len": "it is llm.engine.input_processor.max_model_len",
    "get_num_unfinished_requests": "llm.engine.output_processor.requests has them, by id",
    "do_log_stats": "llm.stats and llm.get_metrics() tell",
    "generate": "LLM(...) generates; an engine takes add_request() and step()",
    "sleep": "it is llm.sleep()",
    "wake_up": "it is llm.wake_up()",
}


class EngineMethods:
    """Base of `GuardedEngine`, which has the rest."""

    model_config: "ModelConfig"
    tokenizer: Any

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "Self":
        """Make one of `nanoserve.EngineArgs`, as scripts for vLLM do."""
        return engine_args.create_engine()

    def get_model_config(self) -> "ModelConfig":
        """Return what the checkpoint says of the model."""
        return self.model_config

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the checkpoint's tokenizer, as transformers has it; `ValueError` without one."""
        require(self.tokenizer is not None, "this engine has no tokenizer: skip_tokenizer_init")
        return self.tokenizer.hugging_face

    if not TYPE_CHECKING:  # or every name would be a good one to a type checker

        def __getattr__(self, name: str) -> Any:
            raise attribute_error(self, name, _ELSEWHERE)
