"""Sentences of the reference that the code does not contain.

Keys are names in the code; `reference_tables` raises if a key does not exist in the code.
"""

# Options of `EngineConfig` without a comment that the reference can use.
OPTIONS = {
    "model": "A checkpoint folder, a GGUF file, a bundled or packaged model, or a name on the "
    "Hugging Face Hub; see [models](models.md#names).",
    "logits_processors": "Callables that change the logits of all rows of a step at once, and "
    "vLLM's classes; see [recipes](../recipes/index.md).",
}

# The response of each endpoint.
ENDPOINTS = {
    "/v1/chat/completions": "An answer to a conversation; with `stream` as server-sent events.",
    "/v1/completions": "The continuation of a string, of several strings, or of token ids; with "
    "`stream` as server-sent events.",
    "/v1/responses": "OpenAI's Responses API: an answer to items, with typed events as a stream; "
    "see [Other APIs](#other-apis).",
    "/v1/responses/input_tokens": "The number of tokens of the input of such a request.",
    "/v1/responses/{response_id}": "GET: a stored response, or one that is being generated. "
    "DELETE: forgets it.",
    "/v1/responses/{response_id}/cancel": "Ends a response that is being generated; its `status` "
    'is "cancelled".',
    "/v1/responses/{response_id}/input_items": "The items from which a response was generated, by "
    "pages: `?limit=20&order=desc&after=ID`.",
    "/v1/messages": "Anthropic's Messages API: an answer of content blocks, with typed events as a "
    "stream; see [Other APIs](#other-apis).",
    "/v1/messages/count_tokens": "The number of tokens of the prompt of such a request.",
    "/v1/models": "The served models, each with its `max_model_len`, data types, architecture "
    "and capabilities.",
    "/v1/models/{name:path}": "One of these models; 404 for a name that is not served.",
    "/tokenize": "The token ids of a prompt or of a conversation, their `count` and "
    "`max_model_len`; with `return_token_strs` also the tokens as strings.",
    "/detokenize": "The text of token ids, at most `max_model_len` of them.",
    "/v1/embeddings": "With a [model that pools](../guides/embeddings.md): an embedding of each "
    "text, as numbers or in base64.",
    "/pooling": "The same, also with other pooling types; for the type ALL, a row for each token.",
    "/classify": "With a model that pools: the probabilities of the classes for each text.",
    "/score": "With a model that pools: the score of each pair of texts.",
    "/v1/score": "The same as `/score`.",
    "/rerank": "With a model that pools: documents by their relevance to a query.",
    "/v1/rerank": "The same as `/rerank`.",
    "/v2/rerank": "The same as `/rerank`.",
    "/v1/load_lora_adapter": "With `--lora-root`: serves an [adapter](../guides/lora.md) under a "
    "name: `lora_name`, `lora_path`, and `load_inplace` to replace one.",
    "/v1/unload_lora_adapter": "With `--lora-root`: serves the adapter `lora_name` no more.",
    "/health": "200 while requests are answered; 503 when the engine has failed, when a step "
    "hangs, and while the server is stopping.",
    "/ping": "The same as `/health`.",
    "/healthz": "The same as `/health`.",
    "/readyz": "200 while a new request would be computed: as `/health`, but 503 also while the "
    "engine sleeps or is paused.",
    "/livez": "200 unless only a restart can help: 503 when the engine has failed or a step hangs.",
    "/version": "The version of nanoserve.",
    "/metrics": "[Metrics](metrics.md#prometheus) in Prometheus' text format.",
    "/load": "With `--enable-server-load-tracking`: `server_load`, the number of requests to POST "
    "endpoints under `/v1` that are in progress.",
    "/openapi.json": "With `--enable-offline-docs`: the schema of the API (OpenAPI 3.1), made from "
    "the models that check requests.",
    "/docs": "With `--enable-offline-docs`: a page about that schema, without scripts.",
    "/live": "The state of the engine as server-sent events, for the page at `/`: the running "
    "requests and the KV pool, block by block.",
    "/": "A page for a browser: conversations with the model, and a view of the running engine.",
    "/page/{name}": "The files of that page.",
    "/pause": "With `--enable-dev-endpoints`: stops stepping, `?mode=abort` (running requests end, "
    "and with `clear_cache=true` the prefix cache is reset) or `?mode=keep` (they wait).",
    "/resume": "With `--enable-dev-endpoints`: the end of a pause.",
    "/is_paused": "With `--enable-dev-endpoints`: `is_paused`.",
    "/sleep": "With `--enable-dev-endpoints`: aborts running requests and releases memory, "
    "`?level=1` or `?level=2`; requests get 503 until `/wake_up`.",
    "/wake_up": "With `--enable-dev-endpoints`: wakes all parts, or `?tags=weights` or "
    "`?tags=kv_cache` alone.",
    "/update_weights": "With `--enable-dev-endpoints`: replaces all weights by those in a folder "
    "on the server, `?path=FOLDER`, with `version` and `mode` as for `AsyncLLM.update_weights`.",
    "/is_sleeping": "With `--enable-dev-endpoints`: `is_sleeping`.",
    "/server_info": "With `--enable-dev-endpoints`: the version, and the options of the engine "
    "(`config`) and of the server (`server`), API keys excepted.",
    "/reset_prefix_cache": "With `--enable-dev-endpoints`: evicts all cached prefixes; with "
    "`?reset_running_requests=true` running requests recompute theirs, too. Blocks on the host "
    "(`kv_offloading_size`) are always forgotten as well; `?reset_connector=true` is rejected if "
    "there is a KV connector.",
}

# Fields of requests that are not sampling parameters of the same name.
FIELDS = {
    "model": "One of the served names; 404 for any other.",
    "messages": "The conversation: `role`, and `content` as a string or a list of text parts.",
    "prompt": "A string, a list of strings, token ids, or a list of such lists. "
    "/tokenize: a string.",
    "prompt_embeds": "Prompts that are embeddings: one or a list of tensors, as base64 of what "
    "`torch.save` has written. Requires `--enable-prompt-embeds`.",
    "tokens": "Token ids.",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`; it takes precedence.",
    "logprobs": "Completions: number of log-probabilities per token. Chat: whether to return any.",
    "top_logprobs": "Number of candidates per token, in addition to the sampled one; requires "
    "`logprobs`.",
    "logit_bias": "Added to logits, by token id (a string, because JSON keys are strings).",
    "response_format": '`{"type": "text"}`, "json_object" (with or without a `schema`), '
    '"json_schema" or "structural_tag". With tools, for outputs without calls.',
    "structured_outputs": "A grammar: an object with the fields of "
    "[`StructuredOutputsParams`](../api.md#structured-output).",
    "guided_json": 'vLLM\'s older name of `structured_outputs={"json": ...}`.',
    "guided_regex": "The same, for a regular expression.",
    "guided_choice": "The same, for a list of choices.",
    "guided_grammar": "The same, for a grammar.",
    "guided_whitespace_pattern": "Regular expression for whitespace in the JSON of `guided_json`.",
    "return_tokens_as_token_ids": 'Tokens in `logprobs` are written "token_id:5".',
    "echo": "The output begins with the prompt, whose tokens then have log-probabilities, too.",
    "stream": "Stream the output as server-sent events.",
    "stream_options": "`include_usage`: a last event with the usage. `continuous_usage_stats`: "
    "usage in every event.",
    "priority": "Requires `--scheduling-policy priority`; lower values run first.",
    "cache_salt": "Cached prefixes are shared only with requests that have the same salt.",
    "return_token_ids": "Adds the token ids of prompt and output.",
    "request_id": "The end of the `id` of the response: 1 to 128 printable ASCII characters.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens, such as BOS, to the "
    "prompt.",
    "return_token_strs": "Adds the tokens as strings.",
    "add_generation_prompt": "Whether the template begins the answer.",
    "continue_final_message": "The answer continues the last message.",
    "chat_template": "A Jinja template for this request; 400 unless the server has "
    "`--trust-request-chat-template`.",
    "chat_template_kwargs": 'Variables of the template, such as `{"enable_thinking": false}`.',
    "tools": "Functions that the model may call.",
    "tool_choice": '"none", "auto", "required", or an object that names a function, or some as '
    "`allowed_tools`.",
    "parallel_tool_calls": "False: at most one call in an output.",
    "documents": "Passed to the template.",
    "reasoning_effort": 'Passed to templates that use it. "none" sets `enable_thinking=false` '
    "or `thinking=false` in templates that have it.",
    "thinking_token_budget": "Maximum number of reasoning tokens; needs `--reasoning-parser`. "
    "-1: no limit.",
    "verbosity": "Passed to templates that use it.",
    "allow_special_tokens": "Special tokens in the text of messages are control tokens. Only "
    "nanoserve has this field.",
}

# Fields of the endpoints that pool.
POOLING = {
    "model": "One of the served names; 404 for any other.",
    "input": "A string, a list of strings, token ids, or a list of such lists.",
    "encoding_format": '"float", or "base64" of float32 in little-endian order.',
    "dimensions": "Only the first numbers of each vector.",
    "normalize": "Whether vectors are scaled to length 1; by default as the checkpoint says.",
    "task": '"embed", "classify", "token_embed" or "token_classify".',
    "pooling_type": '"LAST", "MEAN", "CLS" or "ALL".',
    "text_1": "One text, or as many as in `text_2`.",
    "text_2": "The other texts.",
    "queries": "The same as `text_1`.",
    "documents": "`/score`: the same as `text_2`. `/rerank`: strings, or objects with a `text`.",
    "data_1": "The same as `text_1`.",
    "data_2": "The same as `text_2`.",
    "query": "The text to which documents are compared.",
    "top_n": "The number of documents that are returned; all of them by default.",
    "return_documents": "False: results have indices only.",
    "instruction": "The instruction for a template of the pair. Only nanoserve has this field.",
    "use_activation": "False: logits instead of probabilities; for embeddings as `normalize`.",
    "truncate_prompt_tokens": "The number of tokens of a text to keep; -1: as many as fit.",
    "truncation_side": '"right" only: ends of texts are cut off.',
    "add_special_tokens": "Whether the tokenizer adds its special tokens, such as EOS.",
    "priority": "Requires `--scheduling-policy priority`; lower values run first.",
    "cache_salt": "Cached prefixes are shared only with requests that have the same salt.",
    "request_id": "The end of the `id` of the response.",
}

# Fields of /v1/responses; sampling parameters and vLLM's fields have no entries.
RESPONSES = {
    "model": "One of the served names; 404 for any other.",
    "input": "A string, or a list of items: messages with text, `function_call`, "
    "`function_call_output`, `reasoning`, and `item_reference` to an output item of a stored "
    "response.",
    "instructions": "A system message before all others. Not kept for the responses that continue "
    "this one.",
    "previous_response_id": "A stored response, whose items come before `input`.",
    "max_output_tokens": "Maximum number of tokens; the response is then incomplete.",
    "max_tool_calls": "No effect: it counts calls of tools that a server runs.",
    "temperature": "See [sampling parameters](sampling-parameters.md).",
    "top_p": "The same.",
    "top_logprobs": 'Number of candidates per token; needs `include=["message.output_text.'
    'logprobs"]`.',
    "tools": 'Functions: `{"type": "function", "name", "description", "parameters", "strict"}`. '
    "Only `strict: true` enforces a schema in calls that the model may choose. Other types are "
    "rejected by name.",
    "tool_choice": '"none", "auto", "required", or an object that names a function or has the type '
    '"allowed_tools".',
    "parallel_tool_calls": "False: at most one call in an output.",
    "text": '`format` of the type "text", "json_object" or "json_schema", and `verbosity` for '
    "templates that use it.",
    "reasoning": "`effort` is passed to the template as `reasoning_effort`. `summary` has no "
    "effect: the reasoning itself is in the item's `content`.",
    "include": '"reasoning.encrypted_content": reasoning items have their text in base64, which '
    'is accepted again. "message.output_text.logprobs": log-probabilities of an answer without '
    "tools and reasoning. The other values of the API belong to items that do not occur.",
    "truncation": '"disabled" or "auto". An input that is too long is rejected in either case.',
    "store": "False: the response is not kept.",
    "stream": "Stream the response as typed server-sent events.",
    "stream_options": "No effect: events are never padded.",
    "background": "False only.",
    "metadata": "At most 16 strings, which the response repeats.",
    "user": "Repeated in the response.",
    "safety_identifier": "Repeated in the response.",
    "prompt_cache_key": "Repeated in the response.",
    "service_tier": "No effect.",
}
# Fields of /v1/messages; sampling parameters and vLLM's fields have no entries.
MESSAGES = {
    "model": "One of the served names; 404 for any other.",
    "messages": "The conversation. Content is a string or blocks: `text`, `tool_use`, "
    "`tool_result`, `thinking` (passed to the template), `redacted_thinking` (ignored). A last "
    "message of the assistant is continued.",
    "max_tokens": "Required. It may exceed the context, whose end then ends the answer "
    '(`stop_reason` "model_context_window_exceeded").',
    "system": "A string or text blocks, as a system message.",
    "temperature": "See [sampling parameters](sampling-parameters.md).",
    "top_p": "The same.",
    "top_k": "The same.",
    "stop_sequences": "Strings that end the answer; `stop_sequence` is the one that did.",
    "tools": '`{"name", "description", "input_schema", "strict"}`. Tools with another `type` than '
    '"custom" are rejected by name.',
    "tool_choice": 'The type "auto", "any", "none", or "tool" with a `name`; '
    "`disable_parallel_tool_use` allows one call only.",
    "thinking": 'The type "enabled" or "adaptive" sets `enable_thinking` (or `thinking`) in '
    'templates that use it, "disabled" unsets it; without the field the template decides. '
    '`display: "omitted"` leaves out the text. `budget_tokens` is enforced if the server limits '
    "reasoning.",
    "output_config": "`effort` is passed to the template as `reasoning_effort`; `format` is a JSON "
    "schema.",
    "stream": "Stream the answer as typed server-sent events, with pings while it waits.",
    "metadata": "No effect.",
}

# Models by the architecture in their `config.json`.
FAMILIES = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite and V2.5",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1, Moonlight",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Glm4ForCausalLM": "GLM-4-0414",
    "GlmForCausalLM": "GLM-4 (glm-4-9b-hf)",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "Granite 3",
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2 and derived models",
    "MiniCPMForCausalLM": "MiniCPM, MiniCPM4 (dense attention)",
    "MistralForCausalLM": "Mistral, with and without sliding window",
    "MixtralForCausalLM": "Mixtral",
    "Olmo2ForCausalLM": "OLMo 2",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3's mixtures of experts",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5 (text)",
    "Qwen3_5MoeForCausalLM": "Qwen3.5's mixtures of experts (text)",
    "SmolLM3ForCausalLM": "SmolLM3",
}

# By `quant_method`: what is supported, and some of what is rejected.
FORMATS = {
    "compressed-tensors": (
        "int-quantized, pack-quantized (4-bit and 8-bit), float-quantized, mxfp4-pack-quantized; "
        "several schemes in one checkpoint",
        "static activation scales, quantized KV cache, sparsity, transforms, nvfp4",
    ),
    "fp8": (
        "blocks (`weight_scale_inv`), per-tensor or per-channel scales; float or ue8m0 scales",
        "static activation scales",
    ),
    "awq": ("gemm", "gemv, llm-awq"),
    "gptq": (
        "2-bit, 4-bit and 8-bit; both conventions of zero points; act-order",
        "3-bit, marlin, schemes per module",
    ),
    "mxfp4": (
        "gpt-oss's experts (`_blocks`, `_scales`)", "a NaN as a scale"
    ),
    "bitsandbytes": ("NF4, FP4, nested or not; int8", "16-bit weights"),
    "gguf": ("a file of llama.cpp: see [GGUF](#gguf)", "types, architectures and settings that "
             "are not listed there"),
}  # fmt: skip

# By the value of `quantization`: the format of unquantized weights after loading.
SCHEMES = {
    "int8": ("int8 with per-channel scales", "CPU, GPU"),
    "int4": ("int4 with one scale per `quantization_group_size` weights", "CPU, GPU"),
    "fp8": ("e4m3 with per-channel scales", "GPU"),
}

# By name: device, requirements, description.
BACKENDS = {
    "torch": ("CPU, GPU", "nothing", "The reference implementation in torch operations; it is "
              "slow."),
    "numba": ("CPU", "the package numba (extra `cpu`); float32 or bfloat16", "Kernels compiled by "
              "numba that read the paged cache in place. The default on a CPU if it is installed."),
    "triton": ("GPU", "the package triton, a C compiler, compute capability 8.0 or newer",
               "Triton kernels, CUDA graphs of all kinds of steps. The default on a GPU. On a CPU "
               "only in Triton's interpreter (`TRITON_INTERPRET=1`), for tests."),
    "flash_attn": ("GPU", "the package flash-attn (version 2, with `block_size` a multiple of "
                   "256), or `flash_attn_interface` (version 3) on Hopper; float16 or bfloat16",
                   "FlashAttention. With version 3, it computes prompts, and Triton decode rows. "
                   "It supports no 8-bit KV cache, latent attention or attention sinks."),
}  # fmt: skip

# Bounds that reject a request or a checkpoint, by subject: the constant, its unit, and where it
# applies.
BOUNDS = {
    "request": {
        "nanoserve.utils.list_checks.MOST_TOKEN_IDS": (
            "entries", "a list of token ids of `SamplingParams`, and `logit_bias`"),
        "nanoserve.utils.list_checks.MOST_STOPS": ("strings", "`stop`"),
        "nanoserve.utils.list_checks.MOST_STOP_CHARACTERS": (
        "characters",
        "all of `stop` together",
    ),
        "nanoserve.utils.list_checks.MOST_LOGPROB_IDS": ("entries", "`logprob_token_ids`"),
        "nanoserve.utils.list_checks.MOST_BAD_WORDS": ("strings", "`bad_words`"),
        "nanoserve.utils.list_checks.MOST_BAD_WORD_CHARACTERS": (
            "characters", "all of `bad_words` together"),
        "nanoserve.utils.list_checks.LONGEST_BAD_WORD": ("characters", "one of `bad_words`"),
        "nanoserve.text.chat._MOST_CHARACTERS": (
            "characters", "the messages of a conversation; more if `max_model_len` tokens can "
            "represent more"),
        "nanoserve.text.chat._DEEPEST": ("levels", "nested lists and dictionaries in a "
                                    "message"),
        "nanoserve.text.chat_template._LARGEST_FILE": ("bytes", "the file of a chat template"),
        "nanoserve.serve.http.lora._MOST_NAMES": ("adapters", "the names that a server has loaded"),
        "nanoserve.serve.http.lora._LONGEST_NAME": ("characters", "`lora_name`"),
        "nanoserve.serve.http.tensor_field._MOST_ENTRIES": (
            "entries", "the archive of a tensor in `prompt_embeds`"),
        "nanoserve.serve.http.tensor_field._MOST_PICKLED": (
            "bytes", "the pickle of a tensor in `prompt_embeds`"),
        "nanoserve.features.speculative.config._MOST_DRAFT_TOKENS": (
            "tokens", "`num_speculative_tokens` of `speculative_config`"),
    },
    "grammar": {
        **{f"nanoserve.features.structured.params._MOST_CHARACTERS[{name}]": (
            "characters", f"`{name}`" if name != "%llguidance" else "a grammar that the server "
            "generates for tools")
           for name in ("json", "regex", "choice", "grammar", "%llguidance", "structural_tag",
                        "whitespace_pattern")},
        "nanoserve.features.structured.params._MOST_CHOICES": ("strings", "`choice`"),
        "nanoserve.features.structured.params._MOST_STRUCTURES": ("structures", "`structural_tag`"),
        "nanoserve.features.structured.params._DEEPEST": (
            "levels", "nested lists and objects in a JSON schema"),
        "nanoserve.features.structured.limits.MOST_LEVELS": (
            "levels", "nested lists and objects of a JSON schema, following its references"),
        "nanoserve.features.structured.limits.MOST_LEVELS_OF_XGRAMMAR": (
            "levels", "the same, with the backend xgrammar"),
        "nanoserve.features.structured.limits.MOST_NAMES_OF_ONE": (
            "names", "`properties`, `patternProperties` or `required` of one object of a schema"),
        "nanoserve.features.structured.limits.MOST_NAMES": (
        "names",
        "the same, of all its objects",
    ),
        "nanoserve.features.structured.limits.MOST_RULES": ("rules", "`grammar`"),
        "nanoserve.features.structured.limits.MOST_BRACKETS": (
            "brackets", "brackets of `grammar` that are open at the same time"),
        "nanoserve.features.structured.schemas._MOST_PARTS": (
            "schemas", "a JSON schema with its references expanded, including values of enums"),
        "nanoserve.features.structured.schema_numbers._MOST_MULTIPLE": (
            "", "`multipleOf` of a JSON schema, as a whole number of its smallest step"),
        "nanoserve.features.structured.xgrammar_schemas._MOST_LENGTH": (
            "", "counts in a JSON schema, such as `maxLength`, with the backend xgrammar"),
        "nanoserve.features.structured.checker._TIME_LIMIT": ("seconds", "checking a grammar"),
        "nanoserve.features.structured.extension._TIME_LIMIT": ("seconds", "compiling a grammar"),
    },
    "server": {
        "nanoserve.serve.http.connection._MOST_HEADER_BYTES": ("bytes", "the headers of a request"),
        "nanoserve.serve.http.connection._HEADER_SECONDS": (
            "seconds", "the time in which the headers of a request arrive"),
        "nanoserve.serve.http.port._STALLED_SECONDS": (
            "seconds", "the time for which a client may leave sent data unread"),
        "nanoserve.serve.http.dashboard.MAX_WATCHERS": ("clients", "readers of `/live` at a time"),
        "nanoserve.serve.http.tools.tool_choice._MOST_TOOLS": ("functions", "`tools`"),
        "nanoserve.serve.http.tools.tool_choice._MOST_ARGUMENTS": (
            "items", "arguments of all tool calls in `messages`, counted as those of a body"),
        "nanoserve.serve.http.tools.grammar._MOST_CALLS": (
            "calls", "tool calls of one output, where they follow a grammar"),
        "nanoserve.serve.http.tools.grammar._MOST_THOUGHTS": (
            "messages", "harmony's messages before the last one, where that follows a grammar"),
        "nanoserve.serve.http.tools.raw_arguments._MOST_ARGUMENTS": (
            "arguments", "arguments of a call of a function without a schema, in formats without "
            "JSON, where calls follow a grammar"),
        "nanoserve.serve.http.tools.raw_arguments._MOST_FOLLOWED": (
            "schemas", "the schema of one argument, with its references and alternatives, in such "
            "formats"),
        "nanoserve.serve.http.responses.request._MOST_METADATA": (
            "pairs", "`metadata` of `/v1/responses`"),
        "nanoserve.serve.http.responses.endpoints._MOST_ITEMS": (
            "items", "one page of `/v1/responses/{response_id}/input_items`"),
        "nanoserve.serve.batch.requests.MOST_BYTES": ("bytes", "a line of a batch file"),
    },
    "checkpoint": {
        "nanoserve.checkpoint.config_json._MAX_JSON_BYTES": (
            "bytes", "`config.json` and the other files in JSON"),
        "nanoserve.checkpoint.pooling_config._MOST_BYTES": (
            "bytes", "`modules.json` of sentence-transformers"),
        "nanoserve.features.lora.adapter_config.MOST_BYTES": ("bytes", "`adapter_config.json`"),
        "nanoserve.features.lora.stored_header._MOST_BYTES": (
            "bytes", "the header of `adapter_model.safetensors`"),
        "nanoserve.features.lora.stored_header._LONGEST_NAME": (
            "characters", "the name of a tensor of an adapter"),
        "nanoserve.features.lora.stored_header._LONGEST_TYPE": (
            "characters", "the type of a tensor of an adapter"),
        "nanoserve.features.lora.adapter_config._MOST_PATTERNS": (
            "patterns", "`rank_pattern` and `alpha_pattern` of an adapter"),
        "nanoserve.features.lora.tensor_names._MOST_MODULES": ("modules", "an adapter"),
        "nanoserve.checkpoint.config_json._LARGEST_SIZE": (
            "", "sizes in `config.json`, such as `hidden_size`"),
        "nanoserve.checkpoint.config_json._LARGEST[vocab_size]": (
            "", "`vocab_size` in `config.json`"),
        "nanoserve.checkpoint.config_json._LARGEST[max_position_embeddings]": (
            "", "`max_position_embeddings` in `config.json`"),
        "nanoserve.checkpoint.gguf.container._MAX_DIMS": (
            "dimensions", "a tensor of a GGUF file"),
        "nanoserve.checkpoint.formats.bitsandbytes._MAX_STATE_BYTES": (
            "bytes", "the quantization state of a bitsandbytes tensor"),
        "nanoserve.checkpoint.formats.schemes._MAX_PATTERN": (
            "characters", "a regular expression that names modules (compressed-tensors)"),
        "nanoserve.checkpoint.formats.schemes._MAX_NAME": (
            "characters", "the name of a module that such an expression is matched with"),
        "nanoserve.checkpoint.formats.schemes._MAX_REPEATS": (
            "repetitions", "repetitions in such an expression"),
        "nanoserve.features.speculative.hidden_head._MAX_SIZE": (
            "", "sizes in the file of a hidden head"),
        "nanoserve.attention.flash._MAX_HEAD_DIM": ("", "`head_dim` with flash-attn"),
        "nanoserve.kernels.triton.add_rms_norm._MAX_HIDDEN": (
            "", "`hidden_size` with the Triton kernels"),
        "nanoserve.worker.cuda_device._MOST_POSITIONS": (
            "positions", "`max_position_embeddings` of a model on a GPU, unless `max_model_len` is "
            "given"),
    },
    "time": {
        "nanoserve.features.lora.extension._TIME_LIMIT": ("seconds", "reading an adapter"),
        "nanoserve.checkpoint.hub._TIMEOUT": (
            "seconds", "waiting for the Hub before the local cache is used"),
        "nanoserve.features.parallel.tensor_parallel._START_TIMEOUT": ("seconds", "a rank's start"),
        "nanoserve.features.parallel.tensor_parallel._LOAD_TIMEOUT": (
            "seconds", "loading the weights, compiling and recording graphs in a rank"),
        "nanoserve.features.parallel.ray_workers._PLACE_TIMEOUT": (
            "seconds", "the time in which Ray places all ranks"),
        "nanoserve.features.parallel.ray_workers._CONNECT_TIMEOUT": (
            "seconds", "the time in which a rank that Ray has started connects"),
        "nanoserve.serve.engine_process._IMPORT_TIMEOUT": (
            "seconds", "the time to the first heartbeat of the engine process"),
        "nanoserve.serve.replicas.router_client._LONGEST_ABSENCE": (
            "seconds", "the time without any replica after which waiting requests fail"),
    },
}  # fmt: skip
# Constants with such names that reject nothing: sizes of caches, pieces, messages and waits.
NO_BOUNDS = """
    nanoserve.cli.chat.backend
    nanoserve.cli.chat.lines
    nanoserve.cli.chat.saved
    nanoserve.cli.simulate.fit
    nanoserve.cli.simulate.fleet
    nanoserve.cli.simulate.leap
    nanoserve.cli.simulate.tuner
    nanoserve.attention.quantized_kv
    nanoserve.serve.batch.batch_job
    nanoserve.serve.batch.ray_runner
    nanoserve.serve.batch.restarts
    nanoserve.text.chat_template._LONGEST_PATH
    nanoserve.checkpoint.loader
    nanoserve.checkpoint.errors
    nanoserve.checkpoint.errors
    nanoserve.checkpoint.rope_types
    nanoserve.utils.checks
    nanoserve.config._SMALLEST
    nanoserve.engine.pause._POLL_SECONDS
    nanoserve.features.request_spans._FLUSH_SECONDS
    nanoserve.features.kv_transfer.block_keys._MOST_REMEMBERED
    nanoserve.features.kv_transfer.load_rate._FEWEST_TOKENS
    nanoserve.features.kv_transfer.prepare._LOAD_TIMEOUT
    nanoserve.engine.bad_words
    nanoserve.text.detokenizer
    nanoserve.text.incremental_decoder
    nanoserve.engine.kv_groups
    nanoserve.engine.text_limit
    nanoserve.kernels.triton.grouped_linear
    nanoserve.kernels.triton.low_rank
    nanoserve.models.layers.low_rank
    nanoserve.kernels.triton.paged_attention
    nanoserve.kernels.triton.quantized_kv
    nanoserve.kernels.triton.quantized_rows
    nanoserve.kernels.triton.split_linear
    nanoserve.kernels.cpu.attention
    nanoserve.kernels.cpu.fixed_point
    nanoserve.kernels.cpu.integer_inputs
    nanoserve.kernels.cpu.store_kv
    nanoserve.features.progress
    nanoserve.features.kv_transfer.block_keys
    nanoserve.features.kv_transfer.load_rate
    nanoserve.features.kv_transfer.prepare._LOAD_TIMEOUT
    nanoserve.features.kv_transfer.pair.messages
    nanoserve.features.kv_transfer.pair.options
    nanoserve.features.kv_transfer.pair.outage
    nanoserve.features.kv_transfer.pair.prefill_request
    nanoserve.features.kv_transfer.pair.producer
    nanoserve.checkpoint.quantized_loader
    nanoserve.models.quantization.gpu_method
    nanoserve.serve.replicas.app
    nanoserve.serve.replicas.messages
    nanoserve.serve.replicas.router_client._MOST_FAILURES
    nanoserve.serve.replicas.fleet_llm
    nanoserve.serve.replicas.discovery
    nanoserve.serve.http.app
    nanoserve.serve.async_llm
    nanoserve.serve.engine_process
    nanoserve.serve.engine_thread
    nanoserve.serve.http.errors
    nanoserve.serve.http.unknown_fields
    nanoserve.serve.http.dashboard._MOST_SHARE
    nanoserve.serve.http.dashboard_state
    nanoserve.serve.http.port._QUIET_SECONDS
    nanoserve.serve.http.response_writer
    nanoserve.serve.http.responses.fields
    nanoserve.serve.http.tools.blocks
    nanoserve.serve.http.tools.python_literal
    nanoserve.serve.http.tools.schema_types
    nanoserve.serve.http.run
    nanoserve.serve.http.settings._SMALLEST
    nanoserve.features.speculative.config._SMALLEST
    nanoserve.features.speculative.goodput
    nanoserve.features.speculative.step_costs
    nanoserve.features.speculative.suffix
    nanoserve.features.structured.backends
    nanoserve.features.structured.checker
    nanoserve.features.structured.compiler
    nanoserve.features.structured.extension.MOST_FORCED
    nanoserve.features.structured.guidance
    nanoserve.features.structured.constrained_sequence
    nanoserve.features.structured.schema_numbers
    nanoserve.features.structured.schemas._MOST_NAMED
    nanoserve.features.structured.xgrammar_schemas._LARGEST
    nanoserve.worker.gpu_memory
    nanoserve.features.parallel.heartbeat
    nanoserve.worker.mixed_program
    nanoserve.features.parallel.process_group
    nanoserve.features.parallel.tensor_parallel._LEFT_TIMEOUT
    nanoserve.features.lora.store._MOST_CHECKED
    nanoserve.serve.http.body_reader._MOST_LISTED
"""

# Combinations that `EngineConfig` rejects; the table has its messages.
REFUSED_OPTIONS = (
    {"max_num_batched_tokens": 8, "max_num_seqs": 16},
    {"num_kv_blocks": 64, "kv_cache_memory_bytes": 2**20},
    {"priority_aging": 8},
    {"quantization_group_size": 64},
    {"kv_events_config": {"enable_kv_cache_events": True, "publisher": print},
     "enable_prefix_caching": False},
    {"trace": "run.jsonl", "async_scheduling": True},
    {"capture_sampling": True, "enforce_eager": True},
    {"capture_sampling": True, "tensor_parallel_size": 2},
    {"capture_mixed_steps": True, "enforce_eager": True},
    {"pipeline_parallel_size": 2, "async_scheduling": True},
    {"pipeline_parallel_size": 2, "capture_sampling": True},
    {"pipeline_parallel_size": 2, "capture_mixed_steps": True},
    {"pipeline_parallel_size": 2,
     "speculative_config": {"method": "hidden_head", "model": "tiny-qwen3"}},
    {"distributed_executor_backend": "ray"},
    {"speculative_config": {"method": "ngram"}, "logits_processors": [print]},
    {"speculative_config": {"method": "ngram", "enforce_eager": False}, "enforce_eager": True},
    {"speculative_config": {"method": "ngram", "enforce_eager": False},
     "pipeline_parallel_size": 2},
    {"speculative_config": {"method": "ngram", "model": "tiny-qwen3-draft"}},
    {"speculative_config": {"method": "draft_model"}},
    {"max_loras": 8},
)  # fmt: skip
# Combinations that are rejected when the model, or the device, is known.
REFUSED_ON_CPU = (
    {"quantization_activations": "none"},
    {"max_model_len": 10**6},
    {"max_model_len": 512, "num_kv_blocks": 4},
    {"attention_backend": "numba", "dtype": "float16"},
    {"quantization": "awq"},
    {"quantization": "fp8"},
    {"enable_lora": True, "model_impl": "transformers"},
    {"enable_lora": True, "distributed_executor_backend": "ray", "tensor_parallel_size": 2},
    {"enable_prompt_embeds": True, "model_impl": "transformers"},
    {"enable_prompt_embeds": True, "runner": "pooling"},
    {"enable_prompt_embeds": True, "pipeline_parallel_size": 2},
    {
        "enable_prompt_embeds": True,
        "speculative_config": {"method": "draft_model", "model": "tiny-qwen3-draft"},
    },
)
REFUSED_PARAMETERS = (
    {"min_tokens": 8, "max_tokens": 4},
    {"n": 2, "temperature": 0},
    {"detokenize": False, "stop": ["."]},
)

# Unsupported features of vLLM, and the option whose message names the alternative.
UNSUPPORTED = {
    "biases in LoRA adapters": "enable_lora_bias",
    "images, audio, video": "limit_mm_per_prompt",
    "KV offloading by LMCache": "kv_offloading_backend",
    "weights offloaded to host memory": "cpu_offload_gb",
    "swapping of preempted sequences": "swap_space",
    "torch.compile": "compilation_config",
    "context parallelism": "decode_context_parallel_size",
    "expert parallelism with all-to-all, EPLB": "enable_eplb",
    "data parallelism within one engine": "data_parallel_size",
    "weights sent by a trainer": "weight_transfer_config",
}

# Histograms, whose help text is their name.
HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "From one token of a completion to the next.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From a request's arrival to its first step.",
    "request_inference_time_seconds": "From a request's first step to its last token.",
    "request_prefill_time_seconds": "From a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last one.",
    "iteration_tokens_total": "Tokens computed in a step.",
    "request_params_n": "`n` of a request.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens of a request's completions together.",
    "request_max_num_generation_tokens": "Tokens of the longest completion of a request that "
    "finished normally.",
    "request_params_max_tokens": "`max_tokens` of a request.",
}

# Attributes of outputs whose comment is missing or is not a sentence.
ATTRIBUTES = {
    "EngineStats.num_steps": "Steps.",
    "EngineStats.num_prompt_tokens": "Prompt tokens of finished requests.",
    "EngineStats.num_output_tokens": "Output tokens of finished requests.",
    "EngineStats.num_computed_tokens": "Tokens that passed through the model, including "
    "recomputed ones.",
    "EngineStats.num_preemptions": "Preemptions.",
    "EngineStats.prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "EngineStats.prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "EngineStats.num_accepted_tokens": "Draft tokens that were accepted.",
    "EngineStats.num_accepted_tokens_per_pos": "Accepted draft tokens by their position in a row.",
    "RequestMetrics.arrival_time": "When the request was created.",
    "RequestMetrics.first_scheduled_time": "When its first step began.",
    "RequestMetrics.first_token_time": "When the first token was sampled, even if it was EOS.",
    "RequestMetrics.last_token_time": "When the last token of the output was sampled.",
    "RequestMetrics.finished_time": "When the request ended.",
    "RequestMetrics.num_output_tokens": "Tokens of all completions together.",
    "RequestMetrics.num_intervals": "Pairs of successive tokens of one completion.",
    "RequestMetrics.interval_seconds": "Sum of the seconds between the tokens of these pairs.",
    "RequestMetrics.num_preemptions": "How often its sequences were preempted.",
}

# Fields of dictionaries among the options whose docstring has no sentence.
CONFIG_FIELDS = {
    "speculative_config.num_speculative_tokens": "Maximum draft tokens of a row, up to 32. "
    "None: 8 on a CPU and 7 on a GPU.",
    "speculative_config.adaptive": "True: choose the number of draft tokens by measured step times "
    "and acceptance rates. False: use all proposed tokens.",
    "speculative_config.model": 'The model of "draft_model", as `LLM` takes it; the file of '
    '"hidden_head" ("tiny-qwen3": the bundled one).',
    "speculative_config.revision": 'Revision of the model of "draft_model".',
    "speculative_config.dtype": 'Dtype of the model of "draft_model".',
    "speculative_config.quantization": 'Quantization of the model of "draft_model".',
    "speculative_config.enforce_eager": "On a GPU, whether steps with draft tokens are launched "
    "kernel by kernel instead of by CUDA graphs. None: False, except with `enforce_eager=True` of "
    "the engine, with several ranks, and with another attention backend than Triton's.",
    "speculative_config.prompt_lookup_min": "Fewest tokens that must match. None: the same as "
    "`prompt_lookup_max`, or 3.",
    "speculative_config.prompt_lookup_max": "Number of tokens that are matched first, the maximum. "
    "None: the same as `prompt_lookup_min`, or 4.",
    "kv_events_config.enable_kv_cache_events": "Whether events are published.",
    "kv_events_config.replay_endpoint": "Not supported: a subscriber that has missed events "
    "starts again.",
}
