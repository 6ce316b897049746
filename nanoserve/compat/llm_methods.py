"""Methods of vLLM's `LLM` other than `generate`, which is in `nanoserve.llm`.

The implementation of each method is in another module; rare ones are imported on first use.
"""

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, Any

from nanoserve.compat.keywords import refuse_keywords
from nanoserve.compat.metrics import Metric, snapshot
from nanoserve.compat.pooling_methods import PoolingMethods
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt, as_prompt_list
from nanoserve.engine.pause import check_pause_options
from nanoserve.features.beam_search import BeamSearchOutput, BeamSearchParams, search_all
from nanoserve.features.collective_rpc import call_on_ranks, check_call
from nanoserve.features.sleep import Sleeper
from nanoserve.features.weight_update import Source, WeightUpdater
from nanoserve.lora_request import LoRARequest, SeveralAdapters
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.text.chat import prompts_of
from nanoserve.utils.checks import attribute_error
from nanoserve.worker.startup_summary import summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self, Unpack

    from nanoserve.cli.engine_args import EngineArgs
    from nanoserve.features.progress import UseTqdm
    from nanoserve.features.sleep import Sleeper
    from nanoserve.text.prompt_types import ChatOptions, Conversation, Conversations


class LLMMethods(PoolingMethods):
    """The base class of `LLM`, with all methods except `generate` and `stream`."""

    engine: GuardedEngine
    _sleeper: "Sleeper | None" = None  # created by the first sleep()

    if TYPE_CHECKING:

        def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]: ...

        def _complete(self, *args: Any, **kwargs: Any) -> list[RequestOutput]: ...

        def close(self) -> None: ...

    def chat(
        self,
        messages: "Conversation | Conversations",
        sampling_params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        use_tqdm: "UseTqdm" = True,
        lora_request: SeveralAdapters = None,
        *,
        priority: AbstractSequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        **chat_options: "Unpack[ChatOptions]",
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        A content is a string, or a list of `{"type": "text", "text": ...}`. The other keywords of
        `generate` are accepted, too. `chat_options`, as in vLLM:

        chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`.
        chat_template: file or string that replaces the checkpoint's template. tools: passed to the
        template. Tool call arguments in messages may be JSON strings, as OpenAI clients keep them;
        they are parsed. continue_final_message: the output continues the last message; also pass
        `add_generation_prompt=False`.

        A special token typed in a message, such as "<|im_end|>", is encoded as ordinary text. Only
        special tokens that the template writes become control tokens. vLLM, and transformers by
        default, turn both into control tokens, as does `allow_special_tokens=True` here. So does
        `generate` with every string, because there the prompt stands for the rendered template.
        """
        own = {"priority": priority, "tokenization_kwargs": tokenization_kwargs}
        prompts = prompts_of(self.engine, messages, **chat_options)
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request, **own)

    def beam_search(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        params: "BeamSearchParams",
        lora_request: LoRARequest | None = None,
        use_tqdm: "UseTqdm" = False,
        concurrency_limit: int | None = None,
    ) -> "list[BeamSearchOutput]":
        """Return the best `beam_width` continuations of every prompt.

        See `nanoserve.features.beam_search`.

        `concurrency_limit`: maximum number of prompts searched at once; None means all prompts.
        """

        def complete(beams: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
            """The complete beams. The engine's `max_logprobs` limits clients, not a beam search."""
            size = len(beams)
            ours = [lora_request] * size
            return self._complete(beams, [params] * size, [0] * size, ours, False, params.logprobs)

        if not (lora_request is None or isinstance(lora_request, LoRARequest)):
            raise ValueError("beam_search takes one lora_request for all prompts")
        self._check_paused()
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, not {type(params).__name__}")
        listed = as_prompt_list(prompts)
        return search_all(self.engine, complete, listed, params, use_tqdm, concurrency_limit)

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> "PreTrainedTokenizerBase":
        """Return the checkpoint's tokenizer as a transformers class; adapters have no other one.

        Raises `ValueError` if there is none.
        """
        return hugging_face_tokenizer(self.engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that have none.

        They come from the checkpoint's generation_config.json, updated by
        `override_generation_config`.
        """
        return self.engine.input_processor.default_sampling_params()

    @property
    def llm_engine(self) -> GuardedEngine:
        """vLLM's name of `engine`."""
        return self.engine

    @property
    def stats(self) -> EngineStats:
        """The totals since the engine started."""
        return self.engine.stats

    def get_metrics(self) -> "list[Metric]":
        """Return the metrics that a server has at /metrics, under vLLM's names.

        Counting starts when the model is loaded. Raises `ValueError` unless the engine was created
        with `LLM(..., disable_log_stats=False)`.
        """
        return snapshot(self.engine)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Evict all cached prefixes; see `GuardedEngine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the KV cache and of the weights until `wake_up`.

        Level 1 copies the weights to host memory (on a CPU, they stay where they are). Level 2
        drops them and reads them again from the checkpoint. Cached prefixes are evicted. Raises
        `ValueError` while requests are unfinished, and for level 1 with several ranks.
        """
        self._get_sleeper().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Resume after `sleep` with the same weights, so a request gets the same output as before.

        `tags` is a list of "weights" and "kv_cache", which can be woken one after the other in any
        order; None means both. Requests are rejected until both are back. Raises `ValueError` for
        other tags, and for a single tag with several ranks, which wake up as a whole.
        """
        self._get_sleeper().wake_up(tags)

    def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Take no step until `resume_generation`, as `AsyncLLM.pause_generation` does.

        Call it while another thread runs `generate`; it returns when the current step has ended. A
        `generate` or a stream under way waits until this or another thread resumes; a new one
        raises `ValueError`, because a program with a single thread would wait for itself.

        mode: "abort" ends running requests, each with a last output. "keep" continues them where
        they stopped when generation resumes.
        clear_cache: after "abort", evict all blocks of the prefix cache, which is required before
        the weights change.

        Raises `ValueError` for vLLM's `wait_for_inflight_requests`, which is not supported.
        """
        check_pause_options(mode, wait_for_inflight_requests)
        self.engine.pause_scheduler(aborts=mode == "abort")
        if clear_cache and mode == "abort":
            self.engine.reset_prefix_cache()

    def resume_generation(self) -> None:
        """Resume stepping after `pause_generation`."""
        self.engine.resume_scheduler()

    def is_paused(self) -> bool:
        return self.engine.pause.is_on

    def _check_paused(self) -> None:
        """Raise `ValueError` if a call that runs requests begins during a pause."""
        if self.engine.pause.is_on:
            raise ValueError(
                "generation is paused since pause_generation(): call resume_generation() first"
            )

    @property
    def weights_version(self) -> int | str:
        """The version of the weights in use, which is 0 for those of the checkpoint."""
        return self.engine.weights_version

    def update_weights(
        self,
        source: "Source",
        *,
        mode: str | None = None,
        version: int | str | None = None,
        keep_old: bool = True,
    ) -> int | str:
        """Replace all weights while the engine runs, and return their version.

        The engine then answers as one that was created with these weights, bit for bit. Cached
        prefixes of other weights are never reused.

        source: all tensors of a checkpoint by name, as in the model's own files: a mapping such as
        a state dictionary, an iterable of (name, tensor), a `torch.nn.Module`, or a folder. They
        are read, and neither kept nor changed. Tied tensors may be given twice if they are equal.
        If the engine quantizes while it loads, it quantizes these weights; a checkpoint that is
        itself quantized needs a folder or file of the same format.

        mode: what happens to unfinished requests. None rejects the update; "wait" runs them to
        their end before it; "abort" ends them, and the next step returns their last outputs; "keep"
        continues them with the new weights and the K and V that the old weights have computed. See
        `CompletionOutput.weights_versions`.

        version: an integer or a string of your own; None counts updates.

        keep_old: by default the old weights stay in memory until the new ones have been loaded, so
        that an error changes nothing. False drops them before, for half of the peak memory; only
        names, shapes and data types are checked before, on every rank. If the update then fails,
        the engine is asleep: `wake_up()` reads the checkpoint, and with one rank another update is
        possible too.

        An engine whose weights are asleep wakes them with the new ones. Raises `ValueError`, before
        anything changes, for missing, unexpected, or misshapen tensors and for those that are not
        floats; errors of an iterator are raised as they are.
        """
        updater = WeightUpdater(self.engine, self._get_sleeper())
        return updater.update(source, mode=mode, version=version, keep_old=keep_old)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: AbstractSequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a registered function on every rank between two steps; return one result per rank.

        method: a name that `nanoserve.register_worker_function` has registered, before or after the
        engine was created, or a built-in function. "weights_checksum" returns the SHA-256 of the
        rank's weights as it keeps them. "memory_stats" returns {"weights_bytes": ...,
        "kv_cache_bytes": ...} of the rank. All ranks call it at the same time, so it may use their
        process groups.

        timeout: seconds that the call may take; None waits without a limit.

        args, kwargs: arguments after the rank's `ModelRunner`. They and the results are serialized
        as JSON: tuples become lists, and keys of dictionaries strings.

        Raises `ValueError`, before anything is sent, for a callable, an unknown name, a timeout
        that is not positive, arguments that are not serializable, and a closed engine or several
        ranks that sleep. If the function fails on a rank, raises `RuntimeError` with the rank and
        its traceback; the engine goes on. Raises `TimeoutError` if a rank returns too late; the
        function is not interrupted, and its rank takes the next step after it. A rank that dies
        ends the engine.
        """
        return call_on_ranks(self.engine, check_call(method, timeout, args, kwargs))

    def _get_sleeper(self) -> "Sleeper":
        if self._sleeper is None:
            self._sleeper = Sleeper(self.engine)
        return self._sleeper

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "Self":
        """Create an `LLM` from `nanoserve.EngineArgs`, as scripts for vLLM do."""
        make: Any = cls
        return make(engine_args.model, **engine_args.options())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from nanoserve.compat.missing import METHODS

            raise attribute_error(self, name, METHODS)

    def _reject(self, unknown: Mapping[str, Any]) -> None:
        if unknown:
            refuse_keywords(unknown)

    def __repr__(self) -> str:
        return f"LLM({summary(self.engine)})"

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hugging_face_tokenizer(tokenizer: Any) -> "PreTrainedTokenizerBase":
    if tokenizer is None:
        raise ValueError(
            "this engine has no tokenizer: it was created with skip_tokenizer_init=True"
        )
    return tokenizer.hugging_face
