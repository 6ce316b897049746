"""What vLLM's `LLM` can do besides `generate`, which is in `nanoserve.llm`.

Each method is a door: what is behind it is loaded when somebody goes through.
"""

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nanoserve.compat.keywords import refuse_keywords
from nanoserve.compat.metrics import Metric, snapshot
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt, as_prompt_list
from nanoserve.features.beam_search import BeamSearchOutput, BeamSearchParams, search_all
from nanoserve.features.sleep import Sleeper
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


class LLMMethods:
    """The base of `LLM`, which has the rest."""

    engine: GuardedEngine
    _sleeper: "Sleeper | None" = None  # made by the first sleep()

    if TYPE_CHECKING:

        def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]: ...

        def _complete(self, *args: Any, **kwargs: Any) -> list[RequestOutput]: ...

        def close(self) -> None: ...

    def chat(
        self,
        messages: "Conversation | Conversations",
        sampling_params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
        use_tqdm: "UseTqdm" = True,
        lora_request: None = None,
        *,
        priority: AbstractSequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        **chat_options: "Unpack[ChatOptions]",
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        A content is a text, or a list of `{"type": "text", "text": ...}`. `chat_options`, as in
        vLLM: `chat_template_kwargs` are the template's own, such as `{"enable_thinking": False}`;
        `chat_template`, a file or a text, takes the place of the checkpoint's; `tools` are told to
        the template, and arguments of tool calls that are texts, as OpenAI's clients keep them, are
        parsed for it; with `continue_final_message` (and `add_generation_prompt=False`) the answer
        goes on where the last message ends. The other keywords are those of `generate`.

        What messages say is text: a special token that somebody typed, such as "<|im_end|>", is a
        word like others, and control tokens are those that the template writes. vLLM, and
        transformers by default, make control tokens of both, which `allow_special_tokens=True`
        does here, too. `generate` does it with every text: there, the prompt is the template.
        """
        own = {"priority": priority, "tokenization_kwargs": tokenization_kwargs}
        prompts = prompts_of(self.engine, messages, **chat_options)
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request, **own)

    def beam_search(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        params: "BeamSearchParams",
        lora_request: None = None,
        use_tqdm: "UseTqdm" = False,
        concurrency_limit: int | None = None,
    ) -> "list[BeamSearchOutput]":
        """The best `beam_width` continuations of every prompt; see `nanoserve.features.beam_search`.

        `concurrency_limit`: at most so many prompts are searched at once; None is all of them.
        """

        def complete(beams: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
            """Complete beams. `max_logprobs` of the engine bounds clients, not a search."""
            size = len(beams)
            return self._complete(beams, [params] * size, [0] * size, False, params.logprobs)

        self._refuse(lora_request)
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, not {type(params).__name__}")
        listed = as_prompt_list(prompts)
        return search_all(self.engine, complete, listed, params, use_tqdm, concurrency_limit)

    def get_tokenizer(self, lora_request: None = None) -> "PreTrainedTokenizerBase":
        """The checkpoint's tokenizer, as transformers has it. `ValueError` if there is none."""
        self._refuse(lora_request)
        return hugging_face_tokenizer(self.engine.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get: the checkpoint's generation_config.json, and what
        `override_generation_config` says."""
        return self.engine.input_processor.default_sampling_params()

    @property
    def llm_engine(self) -> GuardedEngine:
        """vLLM's name of `engine`."""
        return self.engine

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def get_metrics(self) -> "list[Metric]":
        """What /metrics of a server would tell, under vLLM's names, since the model was loaded.

        Raises `ValueError` without `LLM(..., disable_log_stats=False)`: nobody has counted.
        """
        return snapshot(self.engine)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `GuardedEngine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def sleep(self, level: int = 1) -> None:
        """Give back memory until `wake_up`: that of the KV cache, and of the weights.

        level 1 keeps the weights in the host's memory (on a CPU, where they are), 2 reads them
        again from the checkpoint. Cached prefixes are forgotten. Raises `ValueError` while requests
        are unfinished, and for level 1 of several ranks.
        """
        self._get_sleeper().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Go on after `sleep`, with the same weights; what was asked before is answered the same.

        `tags` is a list of "weights" and "kv_cache", which can be woken one after the other in any
        order; None is both. Requests are refused until both are there. Raises `ValueError` for
        other tags, and for one alone of several ranks, which wake as a whole.
        """
        self._get_sleeper().wake_up(tags)

    def _get_sleeper(self) -> "Sleeper":
        if self._sleeper is None:
            self._sleeper = Sleeper(self.engine)
        return self._sleeper

    @classmethod
    def from_engine_args(cls, engine_args: "EngineArgs") -> "Self":
        """As scripts for vLLM make one."""
        make: Any = cls
        return make(engine_args.model, **engine_args.options())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from nanoserve.compat.missing import METHODS

            raise attribute_error(self, name, METHODS)

    def _refuse(
        self, lora_request: None, unknown: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if lora_request is not None or unknown:
            refuse_keywords({"lora_request": lora_request, **unknown})

    def __repr__(self) -> str:
        return f"LLM({summary(self.engine)})"

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def hugging_face_tokenizer(tokenizer: Any) -> "PreTrainedTokenizerBase":
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer: skip_tokenizer_init=True")
    return tokenizer.hugging_face
