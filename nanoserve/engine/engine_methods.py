"""The less common methods of an engine, in addition to add_request, abort and step."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from nanoserve.engine.pause import Pause
from nanoserve.utils.checks import attribute_error, require

if TYPE_CHECKING:
    from collections import deque
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self

    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.executor import Executor
    from nanoserve.engine.interrupts import EngineLock
    from nanoserve.engine.llm_engine import LLMEngine
    from nanoserve.engine.output_processor import OutputProcessor
    from nanoserve.engine.plan import Plan
    from nanoserve.outputs import EngineStats, RequestOutput

T = TypeVar("T")

# Replacements for other attributes of vLLM's class. The table is here and not in
# `nanoserve.compat` because the engine does not import that package.
_ELSEWHERE = {
    **dict.fromkeys(
        ("vllm_config", "scheduler_config", "parallel_config", "device_config", "get_vllm_config"),
        "llm.engine.config has all options of the engine",
    ),
    **dict.fromkeys(
        ("lora_config", "add_lora", "remove_lora", "list_loras"),
        "a request names its adapter: lora_request=LoRARequest(name, number, path)",
    ),
    **dict.fromkeys(
        ("start_profile", "stop_profile"),
        "trace='run.jsonl' records every step, and torch.profiler profiles the whole program",
    ),
    "collective_rpc": "use llm.collective_rpc()",
    "apply_model": "use llm.collective_rpc() with the name of a registered function",
    **dict.fromkeys(
        ("model_executor", "driver_worker", "model_runner", "engine_core"),
        "with one process, llm.engine.executor.model is the model, for inspection only: most "
        "weights are stored in other layouts; llm.update_weights() replaces them",
    ),
    "cache_config": "use llm.engine.config.block_size and llm.engine.executor.num_kv_blocks",
    "max_model_len": "use llm.engine.input_processor.max_model_len",
    "get_num_unfinished_requests": "use len(llm.engine.output_processor.requests)",
    "do_log_stats": "use llm.stats and llm.get_metrics()",
    "generate": "use LLM(...).generate(); an engine has add_request() and step()",
    "sleep": "use llm.sleep()",
    "wake_up": "use llm.wake_up()",
    "update_weights": "use llm.update_weights()",
}


class EngineMethods:
    """The base class of `GuardedEngine` with its less common methods."""

    config: "EngineConfig"
    model_config: "ModelConfig"
    tokenizer: Any
    pause: Pause
    loop: "LLMEngine"
    output_processor: "OutputProcessor"
    _lock: "EngineLock"

    if TYPE_CHECKING:

        @property
        def is_stepping(self) -> bool: ...

        def _abort(self, request_id: str, is_deferred: bool = False) -> Any: ...
        def _recovery(self) -> AbstractContextManager[None]: ...

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "Self":
        """Create an engine from `nanoserve.EngineArgs`, as scripts for vLLM do."""
        return engine_args.create_engine()

    @property
    def weights_version(self) -> int | str:
        """The version of the weights in use: 0 for those of the checkpoint."""
        return self.output_processor.weights_version

    @property
    def stats(self) -> "EngineStats":
        """Totals up to now; later steps do not change the returned object."""
        return self.loop.stats

    @property
    def plans_under_way(self) -> "list[Plan]":
        """Plans of the steps that were launched and not collected, oldest first."""
        return self.loop.plans_under_way

    def subscribe(self, request_id: str) -> "deque[RequestOutput]":
        """Return a queue that receives the outputs of a request, which `step` then does not return.

        Call it before the request is added; `withdraw` removes the queue.
        """
        return self.loop.outputs.subscribe(request_id)

    def is_subscribed(self, request_id: str) -> bool:
        return self.loop.outputs.is_subscribed(request_id)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Evict all cached prefixes; returns True.

        Running sequences keep their blocks; with `reset_running_requests` they recompute their KV,
        too. Blocks on the host (`kv_offloading_size`) are always forgotten with the prefix cache.
        Raises `ValueError` for `reset_connector` if there is a KV connector: it keeps its blocks.
        """
        connector = self.config.kv_connector
        if reset_connector and connector is not None:
            raise ValueError(
                f"reset_connector=True: the KV connector {connector.kv_connector!r} keeps its "
                f"blocks; omit it, or delete them when the engine is closed"
            )
        self._lock.call_soon(lambda: self._reset_prefix_cache(reset_running_requests))
        return True

    def _reset_prefix_cache(self, reset_running_requests: bool) -> None:
        with self._recovery():
            self.loop.reset_prefix_cache(reset_running_requests)

    def change_weights(self, change: Callable[[], None], version: int | str | None = None) -> None:
        """Call `change`, which gives the executor other weights, when no step is in flight.

        If it raises, the version stays. Not for use inside a step.
        """
        with self._lock.turn():
            with self._recovery():
                self.loop.finish_steps()
            change()
            self.loop.begin_weights(version)

    def call_between_steps(self, function: Callable[[], T]) -> T:
        """Call `function` when no step is in flight, and return its result.

        Meanwhile other threads wait, and a second Ctrl-C interrupts it. Not for use inside a step.
        """
        with self._lock.turn(gives_way=True):
            with self._recovery():
                self.loop.finish_steps()
            return function()

    def replace_executor(self, executor: "Executor") -> None:
        """Replace a closed executor with another one that has a pool of the same size."""
        self.loop.replace_executor(executor)

    def get_model_config(self) -> "ModelConfig":
        """Return the model's configuration, read from the checkpoint."""
        return self.model_config

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the checkpoint's tokenizer as a transformers class.

        Raises `ValueError` if the engine has no tokenizer.
        """
        require(
            self.tokenizer is not None,
            "this engine has no tokenizer: it was created with skip_tokenizer_init=True",
        )
        return self.tokenizer.hugging_face

    def pause_scheduler(self, aborts: bool = False) -> None:
        """Take no step until `resume_scheduler`; returns when the current step has ended.

        Requests keep their state, and new ones wait. aborts: end all requests; their last outputs
        go where their other outputs go. A call from inside a step takes effect after that step.
        """
        self.pause.begin(in_step=self.is_stepping)
        if aborts:
            for request_id in list(self.output_processor.requests):
                self._lock.call_soon(partial(self._abort, request_id, True))
        with self._lock.turn():
            pass  # a step that had begun has ended now

    def resume_scheduler(self) -> None:
        """End the pause that `pause_scheduler` has begun."""
        self.pause.end()

    if not TYPE_CHECKING:  # otherwise a type checker would accept every attribute name

        def __getattr__(self, name: str) -> Any:
            raise attribute_error(self, name, _ELSEWHERE)
