"""Request fields of other servers and libraries, and their meaning here.

The HTTP endpoints and `SamplingParams` share these tables. They reject a field in `FOREIGN`, with
what to use instead, unless its value has no effect. Fields in `HARMLESS` are often sent by clients
and affect no output. Any other name is unknown: it is logged once by the server, and rejected by
`SamplingParams`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """A field that nanoserve does not support under this name.

    instead: what to use instead. neutral: values other than None that have no effect. ours: the
    sampling parameter with the same meaning, if there is one. in_python: what to use instead in a
    program, if that differs from HTTP.
    """

    instead: str
    neutral: tuple[Any, ...] = ()
    ours: str | None = None
    in_python: str | None = None


def has_no_effect(value: Any, neutral: Iterable[Any]) -> bool:
    """Return True if `value` is None or one of the `neutral` values.

    JSON's true is not a number: `{"best_of": true}` is an error, not 1.
    """
    if value is None:
        return True
    return any(value == one and (value is True) == (one is True) for one in neutral)


def _renamed(ours: str, names: str, neutral: tuple[Any, ...] = ()) -> dict[str, Foreign]:
    """Return entries for other names of the sampling parameter `ours`."""
    return {name: Foreign(f"use {ours}", neutral, ours) for name in names.split()}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _refused(instead: str, names: str, neutral: tuple[Any, ...] = ()) -> dict[str, Foreign]:
    return {name: Foreign(instead, neutral) for name in names.split()}


_FILTERS = "top_p, top_k and min_p filter tokens"
_PROCESSOR = f"{_FILTERS}; a program may also write a logits processor"
_NO_LOOPS = "use repetition_penalty or frequency_penalty against loops"
_THINKING = 'use chat_template_kwargs={"enable_thinking": false} if the chat template has it'
_TEXT_ONLY = "nanoserve runs text models only"
_IMAGES = f"{_TEXT_ONLY}; send an image's embeddings to /v1/completions (prompt_embeds)"
_NO_LORA = "the name of an adapter (--lora-modules) is the `model` of the request"
_MESSAGES = "send the text in messages"
_EXTRA_OUTPUT = "answers have text, logprobs and usage only"
_CONTEXT = "the context length is set by the server option --max-model-len"
_ONE_LEVEL = "its fields belong at the top level of the request"
_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(...)) searches offline"
_GRAMMAR = (
    'use structured_outputs={"grammar": ...} (or guided_grammar), which takes GBNF and the dialect '
    "of Lark"
)
_JSON = 'use response_format={"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
_REGEX = 'use structured_outputs={"regex": ...} (or guided_regex)'
_CUT = "truncate the prompt before it is sent; POST /tokenize counts its tokens"
_CONVERSATION = "send the whole conversation in messages each time, or use /v1/responses"

FOREIGN: dict[str, Foreign] = {
    # Lengths.
    **_renamed("max_tokens", "max_new_tokens n_predict num_predict max_output_tokens "
               "max_tokens_to_sample max_length max_gen_len num_tokens_to_generate maxTokens "
               "maxOutputTokens max_completion_length"),
    **_renamed("min_tokens", "min_new_tokens min_length min_completion_tokens", (0,)),
    **_refused(_CONTEXT, "num_ctx n_ctx max_context_length max_seq_len truncation_length"),
    **_refused("use thinking_token_budget", "thinking_budget reasoning_budget "
               "thinking_budget_tokens reasoning_max_tokens", (-1,)),
    **_refused(_CUT, "truncate n_keep num_keep n_discard prompt_truncate_len max_prompt_tokens",
               (0, -1)),
    "truncate_prompt_tokens": Foreign(_CUT, (), None, "generate(..., tokenization_kwargs="
                                      "{'truncate_prompt_tokens': ...}) truncates prompts"),
    "truncation": Foreign(_CUT, ("disabled", False)),
    "transforms": Foreign(_CUT, ([],)),
    "context_length_exceeded_behavior": Foreign("a request that is too long is rejected",
                                                ("error",)),
    "t_max_predict_ms": Foreign("max_tokens limits an answer", (0, -1)),
    # Number of answers.
    **_renamed("n", "num_return_sequences num_generations candidate_count n_completions n_cmpl",
               (1,)),
    "best_of": Foreign("request n completions with logprobs, and choose by these", (1,), None,
                       "request n completions with logprobs=0, and sort by cumulative_logprob"),
    **{name: Foreign(_BEAMS, neutral, None, _BEAMS.removesuffix(" offline")) for name, neutral in {
        "use_beam_search": (False,), "length_penalty": (1.0,), "early_stopping": (False,),
        "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "beam_width": (1,),
    }.items()},
    # Penalties.
    **_renamed("repetition_penalty", "repeat_penalty rep_pen repetitionPenalty penalty_repeat",
               (1,)),
    **_renamed("presence_penalty", "presencePenalty penalty_presence", (0,)),
    **_renamed("frequency_penalty", "frequencyPenalty penalty_freq count_penalty", (0,)),
    **_refused("penalties count the whole output; repetition_penalty also counts the prompt",
               "repeat_last_n repetition_context_size presence_context_size frequency_context_size "
               "repetition_penalty_range rep_pen_range penalty_last_n", (-1,)),
    **_refused("penalties apply to every token", "penalize_nl penalize_newline", (False,)),
    **_refused(_NO_LOOPS, "no_repeat_ngram_size encoder_no_repeat_ngram_size", (0,)),
    **_refused(_NO_LOOPS, "encoder_repetition_penalty", (1,)),
    **_refused(_NO_LOOPS, "repetition_penalty_slope rep_pen_slope", (0, 1)),
    "repetition_detection": Foreign("stop strings or repetition_penalty end loops"),
    "dry_multiplier": Foreign(_NO_LOOPS, (0,)),
    "dry_base": Foreign(_NO_LOOPS, (1.75,)),
    "dry_allowed_length": Foreign(_NO_LOOPS, (2,)),
    "dry_penalty_last_n": Foreign(_NO_LOOPS, (-1, 0)),
    "dry_range": Foreign(_NO_LOOPS, (0,)),
    "dry_sequence_breakers": Foreign(_NO_LOOPS, ([], ["\n", ":", '"', "*"])),
    # Selection of tokens.
    **_renamed("temperature", "temp", ()),
    **_renamed("top_p", "topP nucleus p", (1,)),
    **_renamed("top_k", "topK k", (0, -1)),
    **_renamed("min_p", "minP", (0,)),
    **_renamed("seed", "random_seed sampler_seed sampling_seed rng_seed", (-1,)),
    **_renamed("logit_bias", "sequence_bias logitBias token_bias"),
    **_renamed("bad_words", "bad_words_ids banned_strings banned_tokens custom_token_bans",
               ([], "")),
    **_renamed("allowed_token_ids", "allowed_tokens"),
    **_refused("logit_bias of -100 forbids a token", "suppress_tokens begin_suppress_tokens",
               ([],)),
    "do_sample": Foreign("temperature=0 is greedy, and every other temperature samples"),
    "greedy": Foreign("temperature=0 is greedy"),
    **_refused(_PROCESSOR, "typical_p typical tfs_z tfs top_h", (1, 0)),
    **_refused(_PROCESSOR, "top_a epsilon_cutoff eta_cutoff penalty_alpha smoothing_factor "
               "xtc_probability skew nsigma", (0,)),
    **_refused(_PROCESSOR, "top_n_sigma", (-1, 0)),
    **_refused(_PROCESSOR, "min_keep", (0, 1)),
    "xtc_threshold": Foreign(_PROCESSOR, (0.1, 0)),
    "smoothing_curve": Foreign(_PROCESSOR, (1,)),
    "mirostat": Foreign(_PROCESSOR, (0,)),
    "mirostat_mode": Foreign(_PROCESSOR, (0,)),
    "mirostat_tau": Foreign(_PROCESSOR, (0, 5)),
    "mirostat_eta": Foreign(_PROCESSOR, (0, 0.1)),
    "mirostat_target": Foreign(_PROCESSOR, (0,)),
    "mirostat_lr": Foreign(_PROCESSOR, (0, 0.1)),
    "adaptive_target": Foreign(_PROCESSOR, (-1,)),
    "adaptive_decay": Foreign(_PROCESSOR, (0.9,)),
    **_refused("temperature is one number", "dynatemp_range dynatemp_low dynatemp_high", (0,)),
    "dynatemp_exponent": Foreign("temperature is one number", (1,)),
    "dynamic_temperature": Foreign("temperature is one number", (False,)),
    "temperature_last": Foreign("filters are applied after temperature, as in vLLM", (False,)),
    **_refused("the order of filters is fixed, as in vLLM",
               "samplers sampler_priority sampler_order", ([],)),
    "guidance_scale": Foreign(_PROCESSOR, (1,)),
    "negative_prompt": Foreign("it needs guidance_scale, which is not supported", ("",)),
    "watermarking": Foreign(_PROCESSOR, (False,)),
    "watermark": Foreign(_PROCESSOR, (False,)),
    "logits_processors": Foreign("programs may have some: SamplingParams(logits_processors=...)",
                                 ([],)),
    "custom_logit_processor": Foreign(
        "programs may have some: SamplingParams(logits_processors=...)", ("",)),
    "custom_params": Foreign("it needs custom_logit_processor, which is not supported", ({},)),
    **_refused("constraints are structured_outputs, bad_words and logit_bias",
               "force_words_ids constraints forced_bos_token_id forced_eos_token_id "
               "exponential_decay_length_penalty", ([],)),
    "vllm_xargs": Foreign("programs may use SamplingParams(extra_args=...)", ({},)),
    # End of an answer.
    **_renamed("stop", "stop_strings stop_sequences stopSequences stop_sequence stop_words "
               "antiprompt", ([],)),
    **_renamed("stop_token_ids", "eos_token_id stop_tokens", ([],)),
    "stop_regex": Foreign("stop takes strings, not regular expressions", ([],)),
    **_refused("use ignore_eos", "ban_eos_token", (False,)),
    "no_stop_trim": Foreign("use include_stop_str_in_output", (False,)),
    # Structured output.
    **{name: Foreign(instead, (), "structured_outputs") for name, instead in {
        "grammar": _GRAMMAR, "ebnf": _GRAMMAR, "gbnf": _GRAMMAR, "lark": _GRAMMAR,
        "grammar_string": _GRAMMAR, "json_schema": _JSON, "schema": _JSON, "guided_schema": _JSON,
        "format": _JSON, "regex": _REGEX, "regex_string": _REGEX,
        "guided_decoding": 'use structured_outputs={"json": ...}, or "regex", "choice", "grammar"',
        "structural_tag": 'use structured_outputs={"structural_tag": ...}',
        "choices": 'use structured_outputs={"choice": [...]} (or guided_choice)',
    }.items()},
    "guided_decoding_backend": Foreign(
        "use the server option --structured-outputs-config", ("auto",)),
    "grammar_lazy": Foreign(_GRAMMAR, (False,)),
    "grammar_triggers": Foreign('use structured_outputs={"structural_tag": ...}', ([],)),
    # Conversations.
    **_refused('send it as a message: {"role": "system", "content": ...}',
               "system system_prompt systemPrompt instructions system_instruction", ("",)),
    **_refused("the template is the checkpoint's; chat_template_kwargs are passed to it",
               "template instruction_template chat_instruct_command"),
    "chat_template_content_format": Foreign(
        "use the server option --chat-template-content-format", ("auto",)),
    "enable_thinking": Foreign(_THINKING),
    "thinking": Foreign(_THINKING),
    "think": Foreign(_THINKING),
    "enable_reasoning": Foreign(_THINKING),
    "thinking_mode": Foreign(_THINKING),
    "thinkingConfig": Foreign(_THINKING),
    "reasoning": Foreign('use reasoning_effort, or chat_template_kwargs={"enable_thinking": ...}',
                         ({},)),
    "include_reasoning": Foreign("reasoning is a separate field of the answer, which a client "
                                 "may ignore", (True,)),
    "separate_reasoning": Foreign("use the server option --reasoning-parser", (True,)),
    "stream_reasoning": Foreign("reasoning is streamed as it is generated", (True,)),
    "reasoning_format": Foreign("use the server option --reasoning-parser",
                                ("auto", "none")),
    "thinking_forced_open": Foreign(_THINKING, (False,)),
    "safe_prompt": Foreign("send it as a system message", (False,)),
    "prompt_mode": Foreign(_THINKING),
    "functions": Foreign('use tools: [{"type": "function", "function": {...}}]', ([],)),
    "function_call": Foreign("use tool_choice", ("none", "auto")),
    "tool_prompt": Foreign(_MESSAGES, ("",)),
    "guideline": Foreign(_MESSAGES, ("",)),
    "input": Foreign(_MESSAGES),
    "inputs": Foreign("use prompt, or messages"),
    "content": Foreign("use prompt, or messages"),
    "text": Foreign("use prompt for a string, and response_format for a format", ({},)),
    "input_ids": Foreign("prompt of /v1/completions takes token ids"),
    "prompt_token_ids": Foreign("prompt of /v1/completions takes token ids"),
    **_refused("use prompt_embeds of /v1/completions", "prompt_embeds input_embeds"),
    **_refused(_CONVERSATION, "previous_response_id conversation context session_params"),
    "suffix": Foreign("a prompt can only be continued; put the suffix into it in the "
                      "model's fill-in-the-middle format", ("",)),
    **_refused("put it into the prompt", "input_prefix input_suffix", ("",)),
    "input_extra": Foreign("put it into the prompt", ([],)),
    "raw": Foreign("/v1/completions takes a prompt without a template", (False,)),
    "prompt": Foreign(_MESSAGES),
    # Kinds of data that a text model does not read or write.
    "modalities": Foreign(_TEXT_ONLY, (["text"],)),
    "audio": Foreign(_TEXT_ONLY),
    **_refused(_IMAGES, "images image image_data image_url", ([],)),
    **_refused(_TEXT_ONLY, "audio_data video_data videos", ([],)),
    **_refused(_TEXT_ONLY, "mm_processor_kwargs media_io_kwargs multi_modal_data", ({},)),
    # Tools and services outside the model.
    "web_search_options": Foreign("give the model a tool that searches"),
    "search_parameters": Foreign("give the model a tool that searches", ({"mode": "off"},)),
    "plugins": Foreign("give the model a tool", ([],)),
    "data_sources": Foreign("give the model a tool", ([],)),
    **_refused("a server has one model; start another server for another model", "models", ([],)),
    **_refused(_NO_LORA, "lora_path lora_request adapter_id adapters adapter", ("",)),
    "lora": Foreign(_NO_LORA, ([],)),
    **_refused("the options of the servers decide what is transferred: --prefill-server",
               "kv_transfer_params ec_transfer_params", ({},)),
    "background": Foreign("requests are answered synchronously, or by `nanoserve batch`", (False,)),
    "stream_format": Foreign("streams are server-sent events", ("sse",)),
    # Contents of an answer other than its text.
    **_renamed("logprobs", "n_probs top_logprobs_num top_n_tokens num_logprobs", (0,)),
    **_refused("use logprobs", "return_logprob output_scores", (False,)),
    "logprob_token_ids": Foreign("use logprobs; a program may use SamplingParams("
                                 "logprob_token_ids=...)"),
    "token_ids_logprob": Foreign("use logprobs", ([],)),
    **_refused("prompt_logprobs has all positions: select from them",
               "logprob_start_len prompt_logprob_start", (-1, 0)),
    "prompt_logprob_token_ids": Foreign("prompt_logprobs=-1 has the logprobs of all tokens"),
    "decoder_input_details": Foreign("use prompt_logprobs, or echo with logprobs", (False,)),
    "details": Foreign("use logprobs and return_token_ids", (False,)),
    "return_full_text": Foreign("use echo of /v1/completions", (False,)),
    "return_tokens": Foreign("use return_token_ids", (False,)),
    **_refused("POST /tokenize with the same messages returns the prompt's tokens",
               "return_prompt_text return_token_offsets", (False,)),
    "flat_logprobs": Foreign("logprobs have one entry for each token", (False,), None,
                             "logprobs are dictionaries, one for each token"),
    **_refused("logprobs come from the model, before penalties and filters",
               "post_sampling_probs", (False,)),
    **_refused(_EXTRA_OUTPUT, "return_hidden_states timings_per_token "
               "return_progress perf_metrics_in_response return_dict_in_generate", (False,)),
    **_refused(_EXTRA_OUTPUT, "response_fields include", ([],)),
    **_refused("start the server with --enable-return-routed-experts: then every answer that is "
               "not streamed has routed_experts", "return_routed_experts", (False,)),
    "routed_experts_prompt_start": Foreign("routed_experts begin with the prompt's first token",
                                           (0,)),
    # Nested fields.
    **_refused(_ONE_LEVEL, "options parameters sampling_params extra_body generation_config "
               "generationConfig model_kwargs", ({},)),
    # Execution.
    "extra_key": Foreign("use cache_salt"),
    "parse_tool_calls": Foreign('use tool_choice="none", or no tools', (True,)),
    # Fields of programs only.
    "stream_interval": Foreign("use the server option --stream-interval", (1,), None,
                               "use the option of AsyncLLM, for all requests"),
    "skip_reading_prefix_cache": Foreign(
        "use a unique cache_salt: no other request's blocks are then reused", (False,), None,
        "set a unique 'cache_salt' in the prompt: no other request's blocks are then reused"),
    "skip_clone": Foreign("parameters are always copied when a request is made", (False,)),
    "trace_decode_token_ids": Foreign("append the tokens to the prompt, with prompt_logprobs"),
}  # fmt: skip

# Fields of vLLM's `SamplingParams`, current and former ones.
OF_VLLM = _names(
    "best_of use_beam_search length_penalty early_stopping truncate_prompt_tokens "
    "prompt_logprob_token_ids prompt_logprob_start flat_logprobs stream_interval "
    "skip_reading_prefix_cache thinking_token_budget repetition_detection skip_clone "
    "routed_experts_prompt_start trace_decode_token_ids watermarking"
)

# Fields that affect no output: identity and purpose of the caller, storage and placement of the
# computation, and hints about speed.
HARMLESS = _names(
    "user metadata store service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options prediction session_id chat_id "
    "conversation_id user_id message_id trace_id rid log_id tags title keep_alive ttl "
    "timeout request_timeout max_retries num_retries extra_headers extra_query api_key "
    "api_base base_url organization caching cache cache_control litellm_params "
    "litellm_call_id litellm_logging_obj proxy_server_request mock_response "
    "custom_llm_provider drop_params provider route usage betas anthropic_version "
    "safety_settings safetySettings safety_model moderation return_mm_kwargs "
    "truncation_side bootstrap_host bootstrap_port bootstrap_room "
    "data_parallel_rank return_cached_tokens_details cache_prompt id_slot slot_id "
    "draft_model num_draft_tokens prompt_lookup_num_tokens use_cache pad_token_id num_gpu "
    "num_thread num_batch main_gpu low_vram f16_kv use_mmap use_mlock numa vocab_only "
    "backend_sampling"
)

# By part of a request: the names that are known, and the names that are rejected. Any other name is
# logged once. A chat template sees whole messages and tools, so names that it reads have an effect.
PLACES: dict[str, tuple[frozenset[str], dict[str, Foreign]]] = {
    "response_format": (
        _names("type json_schema schema structures triggers"),
        {"value": Foreign(_JSON), "grammar": Foreign(_GRAMMAR),
         "regex": Foreign(_REGEX), "pattern": Foreign(_REGEX)},
    ),
    "response_format.json_schema": (
        _names("name description schema strict"),
        {"json_schema": Foreign("use the field schema")},
    ),
    "stream_options": (
        _names("include_usage continuous_usage_stats include_obfuscation"),
        {"chunk_size": Foreign("use the server option --stream-interval")},
    ),
    "messages": (
        _names(
            "role content name tool_calls tool_call_id refusal reasoning "
            "reasoning_content annotations cache_control id type tool_name status "
            "timestamp created created_at metadata provider_specific_fields "
            "thinking_blocks reasoning_details reasoning_text is_error "
            "prompt_cache_breakpoint model usage finish_reason"
        ),
        {"function_call": Foreign('use tool_calls: [{"id": ..., "type": "function", ...}]', ({},)),
         "images": Foreign(_IMAGES, ([],)),
         "image_url": Foreign(_IMAGES),
         "audio": Foreign(_TEXT_ONLY),
         **_refused("use continue_final_message=true", "prefix partial prefill", (False,))},
    ),
    "messages.content": (
        _names(
            "type text refusal thinking cache_control annotations signature id "
            "prompt_cache_breakpoint citations logprobs"
        ),
        {},
    ),
    "messages.tool_calls": (
        _names(
            "id type function index status cache_control provider_specific_fields extra_content "
            "caller metadata"
        ),
        {},
    ),
    "messages.tool_calls.function": (
        _names(
            "name arguments parsed_arguments description parameters strict "
            "provider_specific_fields thought_signature"
        ),
        {},
    ),
    "tools": (
        _names("type function cache_control defer_loading eager_input_streaming"),
        {},
    ),
    "tools.function": (
        _names("name description parameters strict cache_control defer_loading"),
        _refused("use parameters", "input_schema inputSchema schema arguments args "
                 "parametersJsonSchema", ({},)),
    ),
    "tool_choice": (
        _names("type function allowed_tools"),
        {"disable_parallel_tool_use": Foreign("use parallel_tool_calls=false", (False,)),
         "mode": Foreign('tool_choice is "none", "auto", "required" or names a function')},
    ),
    "tool_choice.allowed_tools": (_names("mode tools"), {}),
}  # fmt: skip
