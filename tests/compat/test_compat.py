"""What scripts for vLLM and nano-vllm ask for is had, or refused with what to do instead."""

import argparse
import copy
import logging
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import edit_json, make_qwen3
from tqdm import tqdm
from transformers import AutoTokenizer

import nanoserve
from nanoserve import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, SamplingParams, compat
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.compat.missing import IN_DROP_IN, METHODS, NAMES
from nanoserve.compat.options import FOREIGN, RENAMED, SPELLINGS, engine_config
from nanoserve.compat.sampling import FOREIGN as FOREIGN_PARAMETERS
from nanoserve.compat.speculation import FOREIGN as FOREIGN_SPECULATION
from nanoserve.config import EngineConfig
from nanoserve.features import progress

GREEDY = SamplingParams(temperature=0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
NO_EFFECT = ["swap_space", "limit_mm_per_prompt", "enable_sleep_mode", "task"]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=400) as llm:
        yield llm


def text(output: Any) -> str:
    return output.outputs[0].text


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_every_option_of_vllms_is_accepted_where_it_asks_for_nothing(name: str) -> None:
    """None is "not given"; and what it is by default there, if that is what is done here."""
    accepts, instead = FOREIGN[name]
    assert engine_config("m", {name: None}) == EngineConfig("m")
    asked = next(
        (v for v in (False, 1, 0, {}, True, "auto", "mp", "lazy", "linear", 4) if accepts(v)), ...
    )
    if asked is ...:
        asked = {
            "kv_offloading_backend": "native",
            "log_level": "info",
            "performance_mode": "balanced",
        }[name]
    assert engine_config("m", {name: asked}) == EngineConfig("m")
    refused = object()
    if not accepts(refused):
        with pytest.raises(ValueError) as caught:
            engine_config("m", {name: refused})
        assert str(caught.value).startswith(f"{name}=") and instead in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_loras": 4}, "enable_lora=True"),
        ({"enable_lora_bias": True}, "merge such an adapter"),
        ({"data_parallel_size": 2}, "nanoserve serve --data-parallel-size N"),
        ({"enable_chunked_prefill": False}, "always computed in chunks"),
        ({"tokenizer_mode": "slow"}, "tokenizer.json"),
        ({"cpu_offload_gb": 4}, "quantization"),
        ({"distributed_executor_backend": "external_launcher"}, "use 'mp' or 'ray' to start ranks"),
        ({"task": "embed"}, "runner='pooling'"),
        ({"pooler_config": {"pooling": "LAST"}}, "['pooling'] are not among ['pooling_type'"),
        ({"pooler_config": {"pooling_type": "STEP"}}, "'STEP' is not one of ['LAST'"),
        ({"pooler_config": {}, "runner": "generate"}, "needs runner='pooling'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "hf_overrides"),
        ({"compilation_config": {"level": 3}}, "nothing is compiled"),
        ({"load_format": "pt"}, "safetensors"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "use 'fp8'"),
        ({"attention_backend": "FLASHINFER"}, "use 'triton'"),
        ({"logprobs_mode": "processed"}, "'processed_logprobs'"),
        ({"gpu_mem_utilization": 0.5}, "did you mean gpu_memory_utilization?"),
        ({"max_model_length": 5}, "did you mean max_model_len?"),
        ({"tensor_parallel": 2}, "did you mean tensor_parallel_size"),
        ({"zzz": 2}, "known options are"),
        ({"torch_dtype": "x"}, "did you mean dtype?"),
        ({"n_ctx": 5}, "did you mean max_model_len?"),
        ({"num_gpu_blocks_override": 5, "num_kv_blocks": 5}, "set as well"),
        ({"logits_processors": ["no"]}, "'no'"),
        ({"hf_overrides": 5}, "hf_overrides=5 must be a dictionary"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_with_advice(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        engine_config("m", options)
    assert told in str(caught.value)


def test_a_token_of_the_hub_is_in_no_message(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="HF_TOKEN") as caught:
        engine_config("m", {"hf_token": "hf_secret"})
    assert "secret" not in str(caught.value)


def test_what_changes_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nanoserve")
    engine_config("m", {**dict.fromkeys(NO_EFFECT[:-1], 4), "task": "generate"})
    assert [record.message.split("=")[0] for record in caplog.records] == NO_EFFECT


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        *(({name: 1}, {ours: 1}) for name, ours in RENAMED.items()),
        *(
            ({name: theirs}, {name: ours})
            for name, spellings in SPELLINGS.items()
            for theirs, ours in spellings.items()
        ),
        *(({"dtype": getattr(torch, name)}, {"dtype": name}) for name in ("float32", "bfloat16")),
        ({"max_num_seqs": None, "seed": None, "block_size": None}, {}),
    ],
    ids=str,
)
def test_vllms_spellings_are_understood(options: dict[str, Any], ours: dict[str, Any]) -> None:
    assert engine_config("m", options) == EngineConfig("m", **ours)


def test_what_a_checkpoint_recommends_can_be_left_or_changed(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    made = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text("{}")
    edit_json(tmp_path / "generation_config.json", **made)

    def recommended(**options: Any) -> SamplingParams:
        with LLM(tmp_path, skip_tokenizer_init=True, num_kv_blocks=8, **options) as llm:
            return llm.get_default_sampling_params()

    own = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    assert recommended() == SamplingParams(**own)
    assert recommended(generation_config="vllm") == SamplingParams()
    changed = {"top_p": 0.5, "max_new_tokens": 9}
    override = {"override_generation_config": changed}
    assert recommended(**override) == SamplingParams(**{**own, "top_p": 0.5, "max_tokens": 9})
    only = recommended(generation_config="vllm", **override)
    assert only == SamplingParams(top_p=0.5, max_tokens=9)
    with pytest.raises(ValueError, match=r"\['tempreture'\] are not sampling parameters"):
        recommended(override_generation_config={"tempreture": 1})


def test_entries_of_config_json_can_be_given(tmp_path: Path) -> None:
    """As transformers reads the file with them in it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    yarn = {"rope_parameters": {"rope_theta": 1e4, **yarn}}
    plain, stretched = tmp_path / "plain", tmp_path / "stretched"
    make_qwen3(plain)
    model = make_qwen3(stretched, **yarn)
    prompt = [*range(60)]
    with LLM(plain, skip_tokenizer_init=True, num_kv_blocks=20, hf_overrides=yarn) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()
    assert output.outputs[0].token_ids == ids[60:]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"sliding_windw": 5}, "does not read 'sliding_windw': did you mean sliding_window"),
        ({"attn_logit_softcapping": 5.0}, "does not read 'attn_logit_softcapping'"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6' must be a number"),
    ],
    ids=str,
)
def test_an_entry_that_is_not_read_is_refused(
    checkpoint: Path, overrides: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        LLM(checkpoint, skip_tokenizer_init=True, hf_overrides=overrides)


@pytest.mark.parametrize("kind", ["transformers 4", "transformers 5"])
def test_a_theta_or_a_scaling_is_changed_wherever_it_stands(tmp_path: Path, kind: str) -> None:
    make_qwen3(tmp_path)
    own = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    if kind == "transformers 4":
        own = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}
    edit_json(tmp_path / "config.json", **own)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

    def rope(**overrides: Any) -> Any:
        options = {"skip_tokenizer_init": True, "num_kv_blocks": 40}
        with LLM(tmp_path, hf_overrides=overrides, **options) as llm:
            return llm.engine.model_config.rope

    assert rope().theta == 5e5
    assert rope(rope_theta=7.0).theta == 7.0
    scaled = rope(rope_scaling=yarn)
    assert (scaled.rope_type, scaled.factor, scaled.theta) == ("yarn", 4.0, 5e5)
    both = rope(rope_scaling=yarn, rope_theta=9.0)
    assert (both.rope_type, both.theta) == ("yarn", 9.0)
    assert rope(rope_scaling={**yarn, "rope_theta": 11.0}).theta == 11.0


def test_arguments_are_an_object_a_dictionary_or_flags() -> None:
    args = EngineArgs(model="tiny-qwen3", enforce_eager=True, max_model_len=64, swap_space=4)
    assert dict(args.options()) == {"enforce_eager": True, "max_model_len": 64}
    with LLM(**asdict(args)) as llm:
        assert llm.engine.config.enforce_eager and llm.engine.input_processor.max_model_len == 64
    parser = EngineArgs.add_cli_args(compat.FlexibleArgumentParser())
    parser.add_argument("--own", default=1)
    parser.set_defaults(model="tiny-qwen3")
    parsed = parser.parse_args(["--max_model_len", "64", "--enforce-eager"])
    assert EngineArgs.from_cli_args(parsed) == args
    foreign = ["--swap-space", "4", "--disable-log-requests", "--compilation-config", "{}"]
    assert EngineArgs.from_cli_args(parser.parse_args(foreign)) == EngineArgs("tiny-qwen3")
    with pytest.raises(ValueError, match=r"enable_lora_bias=True.*merge_and_unload"):
        EngineArgs.from_cli_args(parser.parse_args(["--enable-lora-bias"]))
    given = vars(parsed)
    del given["own"]
    with LLM(**given) as llm:
        assert llm.engine.input_processor.max_model_len == 64
    with pytest.raises(ValueError, match="did you mean max_model_len"):
        EngineArgs(model="tiny-qwen3", max_modellen=3)


def test_an_engine_of_arguments_is_the_same_engine(llm: LLM) -> None:
    args = EngineArgs("tiny-qwen3", dtype="float", num_kv_blocks=400)
    with LLM.from_engine_args(args) as other:
        assert other.engine.config == llm.engine.config
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("0", "The KV cache", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.close()
    assert text(outputs[-1]) == text(llm.generate("The KV cache", GREEDY, use_tqdm=False)[0])


# ---------------------------------------------------------------- methods


def test_every_name_is_where_it_is_said_to_be() -> None:
    for name in compat.__all__:
        assert getattr(compat, name) is not None
    for name in nanoserve.__all__:
        assert getattr(nanoserve, name) is getattr(compat, name, getattr(nanoserve, name))
    params = import_module("nanoserve.sampling_params")
    assert params.BeamSearchParams is nanoserve.BeamSearchParams
    assert params.StructuredOutputsParams is nanoserve.StructuredOutputsParams
    for module in (nanoserve, compat, params):
        with pytest.raises(AttributeError, match="NoSuchThing"):
            _ = module.NoSuchThing
    assert issubclass(AsyncEngineArgs, EngineArgs)
    assert compat.init_logger("a.b") is logging.getLogger("a.b")
    compat.cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"stream": True}, "llm.stream"),
        ({"max_tokens": 5}, r"SamplingParams\(max_tokens=5\)"),
        ({"enable_thinking": False}, "chat_template_kwargs={'enable_thinking': False}"),
        ({"tols": []}, "did you mean tools?"),
        ({"lora_request": "x"}, "must be LoRARequest"),
        ({"mm_processor_kwargs": {"a": 1}}, "text models"),
        ({"documents": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "must be a dictionary"),
        ({"chat_template_content_format": "xml"}, "'openai'"),
        ({"continue_final_message": True}, "add_generation_prompt=True"),
        ({"add_generation_prompt": 1}, "True or False"),
        ({"tokenization_kwargs": {"padding": True}}, "padding"),
        ({"use_tqdm": 5}, "use_tqdm=5"),
    ],
    ids=str,
)
def test_a_keyword_that_chat_does_not_know_is_refused(
    llm: LLM, keywords: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        llm.chat(QUESTION, GREEDY, **{"use_tqdm": False, **keywords})
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"temperature": 0}, r"SamplingParams\(temperature=0\)"),
        ({"max_new_tokens": 4}, r"SamplingParams\(max_tokens=4\)"),
        ({"sampling_param": 1}, "did you mean sampling_params?"),
        ({"prompt_token_ids": [[1]]}, "as the prompt"),
        ({"stream": True}, "llm.stream"),
        ({"tools": []}, "chat"),
        ({"zzz": 1}, "no such keyword"),
        ({"lora_request": 5}, "must be LoRARequest"),
    ],
    ids=str,
)
def test_a_keyword_that_generate_does_not_know_is_refused(
    llm: LLM, keywords: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        llm.generate("x", GREEDY, use_tqdm=False, **keywords)


@pytest.mark.parametrize("more", [{}, {"prompts": None}])
def test_the_older_keyword_for_token_ids_is_told_alone_too(llm: LLM, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pass \{'prompt_token_ids': \[\.\.\.\]\}"):
        llm.generate(prompt_token_ids=[[1, 2]], sampling_params=GREEDY, **more)
    with pytest.raises(ValueError, match="prompts must be a list of prompts"):
        llm.generate(sampling_params=GREEDY, **more)


def test_what_a_tokenizer_returns_is_no_prompt_but_holds_one(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    encoded = tokenizer("The KV cache")
    for prompts in (encoded, [encoded], tokenizer.apply_chat_template(QUESTION, tokenize=True)):
        if isinstance(prompts, list) and isinstance(prompts[0], int):
            continue  # as transformers 4 returns them
        with pytest.raises(ValueError, match=r"prompt\['input_ids'\], or .*return_dict=False"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    (found,) = llm.generate([encoded["input_ids"]], GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == encoded["input_ids"]


def test_what_scripts_look_up_in_an_engine(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.get_model_config() is engine.model_config
    assert engine.get_tokenizer()("x") == llm.get_tokenizer()("x")
    for owner, name, told in (
        (engine.model_config, "max_model_len", "input_processor.max_model_len"),
        (engine.model_config, "hf_config", "AutoConfig"),
        (engine.model_config, "get_vocab_size", "use vocab_size"),
        (engine, "cache_config", "config.block_size"),
        (engine, "model_executor", "executor.model"),
        (engine, "vllm_config", "llm.engine.config"),
        (llm, "model_config", "llm.engine.model_config"),
        (llm, "llm_engin", "'LLM' object has no attribute 'llm_engin'"),
    ):
        with pytest.raises(AttributeError, match=told):
            getattr(owner, name)
        assert not hasattr(owner, name)
    assert engine.input_processor.max_model_len and engine.executor.num_kv_blocks
    assert copy.deepcopy(engine.model_config) == engine.model_config


def test_names_that_drop_in_has_are_told_elsewhere() -> None:
    assert {*compat.__all__} - {*nanoserve.__all__} == IN_DROP_IN


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [
        ("nanoserve.sampling_params", "GuidedDecodingParams", "structured_outputs="),
        ("nanoserve", "AsyncLLMEngine", "from nanoserve.compat import AsyncLLMEngine"),
        ("nanoserve", "PromptType", "from nanoserve.compat import PromptType"),
        ("nanoserve", "FlexibleArgumentParser", "from nanoserve.compat import"),
        ("nanoserve.sampling_params", "NoSuchThing", "NoSuchThing"),
    ],
)
def test_an_import_that_fails_says_what_to_import(module: str, name: str, told: str) -> None:
    with pytest.raises(ImportError, match=told):
        exec(f"from {module} import {name}")


def test_keys_of_a_bias_may_be_texts_as_openai_has_them() -> None:
    assert SamplingParams(logit_bias={"91": 100, 5: -1}).logit_bias == {91: 100.0, 5: -1.0}
    for wrong in ({"91": 1, 91: 1}, {"a": 1}, {"-1": 1}, {"1.0": 1}, {"\u0661": 1}, {True: 1}):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)


def test_an_option_of_older_servers_is_told_where_it_belongs() -> None:
    with pytest.raises(ValueError, match="--reasoning-parser NAME to `nanoserve serve`"):
        engine_config("m", {"enable_reasoning": True})


def test_tools_that_the_template_does_not_show_are_refused(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for ask in (llm.chat, llm.stream):
        with pytest.raises(ValueError, match="the chat template does not show tools"):
            ask(QUESTION, GREEDY, tools=[tool])
    template = "{{ tools[0].function.name }}:{{ messages[0].content }}"
    options = {"tools": [tool], "chat_template": template, "use_tqdm": False}
    assert llm.chat(QUESTION, GREEDY, **options)[0].prompt.startswith("f:What")


def test_a_message_beside_tool_calls_may_have_no_content(llm: LLM) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    empty = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found, expected = (llm.chat(m, GREEDY, use_tqdm=False)[0].prompt for m in (asked, empty))
    assert found == expected


def test_beams_take_their_own_parameters(llm: LLM) -> None:
    with pytest.raises(ValueError, match="must be BeamSearchParams, not SamplingParams"):
        llm.beam_search("x", GREEDY)


def test_the_templates_own_keywords_reach_it(llm: LLM) -> None:
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>{% endif %}"
    )

    def prompt(**keywords: Any) -> str:
        options = {"chat_template": template, **keywords}
        return llm.chat(QUESTION, GREEDY, use_tqdm=False, **options)[0].prompt

    asked = "<|im_start|>What is a KV cache?"
    assert prompt() == f"{asked}<|im_end|>"
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == f"no{asked}<|im_end|>"
    assert prompt(add_generation_prompt=False) == asked
    assert prompt(mm_processor_kwargs=None, lora_request=None) == f"{asked}<|im_end|>"


def test_an_answer_goes_on_where_the_last_message_ends(llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The KV cache keeps"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(begun, GREEDY, use_tqdm=False, **options)
    hf = llm.get_tokenizer()
    expected = hf.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    assert output.prompt == expected and expected.endswith("keeps")
    whole = text(
        llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0]
    )
    assert whole.startswith("The KV cache keeps" + text(output)[:20])


@pytest.mark.parametrize("content_format", ["auto", "string", "openai"])
def test_content_in_parts_is_text_unless_the_template_looks_into_it(
    llm: LLM, content_format: str
) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a KV cache?"}]
    messages = [{"role": "user", "content": parts}]
    joined = [{"role": "user", "content": "What is\na KV cache?"}]
    looking = (
        "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    options = {"chat_template_content_format": content_format, "use_tqdm": False}
    if content_format != "openai":
        (output,) = llm.chat(messages, GREEDY, **options)
        assert output.prompt == llm.chat(joined, GREEDY, use_tqdm=False)[0].prompt
    if content_format != "string":
        (output,) = llm.chat(messages, GREEDY, chat_template=looking, **options)
        assert output.prompt == "[What is][a KV cache?]"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ValueError, match=r"'image_url'.*only text|cannot render"):
        llm.chat(image, GREEDY, **options)


def test_a_stream_of_messages_is_the_answer_of_chat(llm: LLM) -> None:
    expected = text(llm.chat(QUESTION, GREEDY, use_tqdm=False)[0])
    assert "".join(map(text, llm.stream(QUESTION, GREEDY))) == expected
    template = {"chat_template": "{{ messages[0].content }}"}
    streamed = "".join(map(text, llm.stream(QUESTION, GREEDY, **template)))
    assert streamed == text(llm.chat(QUESTION, GREEDY, use_tqdm=False, **template)[0])
    for prompt, options in (("text", {"tools": []}), (QUESTION, {"temperature": 0})):
        with pytest.raises(ValueError):
            llm.stream(prompt, GREEDY, **options)


@pytest.mark.parametrize(
    ("kwargs", "theirs"),
    [
        ({"add_special_tokens": False}, {"add_special_tokens": False}),
        ({"truncation": True, "max_length": 5}, {"truncation": True, "max_length": 5}),
        ({"truncate_prompt_tokens": 4}, None),
        ({"truncate_prompt_tokens": -1}, {}),
    ],
    ids=str,
)
def test_texts_are_tokenized_as_it_is_asked(
    llm: LLM, kwargs: dict[str, Any], theirs: dict[str, Any] | None
) -> None:
    asked = "One two three four five six seven eight nine ten."
    hf = AutoTokenizer.from_pretrained(bundled_checkpoint("tiny-qwen3"))
    expected = hf.encode(asked)[-4:] if theirs is None else hf.encode(asked, **theirs)
    for prompt in (asked, {"prompt": asked}, {"prompt_token_ids": hf.encode(asked)}):
        output = llm.generate(prompt, GREEDY, use_tqdm=False, tokenization_kwargs=kwargs)[0]
        assert output.prompt_token_ids == expected


@pytest.mark.parametrize(
    "kwargs",
    [{"max_length": 5}, {"truncation": True}, {"truncate_prompt_tokens": 0}, {"truncation": 1}],
    ids=str,
)
def test_a_truncation_that_means_nothing_is_refused(llm: LLM, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"truncat|max_length"):
        llm.generate("x", GREEDY, use_tqdm=False, tokenization_kwargs=kwargs)


def test_the_tokenizer_is_transformers_and_nobody_elses_loss(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    asked = "What is a KV cache? " * 20
    before = llm.generate(asked, GREEDY, use_tqdm=False)[0]
    tokenizer(asked, truncation=True, max_length=3)  # which leaves a setting behind
    after = llm.generate(asked, GREEDY, use_tqdm=False)[0]
    assert after.prompt_token_ids == before.prompt_token_ids == tokenizer.encode(asked)
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert rendered == llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].prompt


def test_a_bar_counts_tokens_while_one_long_request_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.005)
    shown: list[str] = []

    class Bar(tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, disable=True)

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            shown.append(s)

    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    llm.generate("x", params, use_tqdm=Bar)
    assert len(shown) > 2  # that time apart, and at the end
    assert all(s.startswith("in ") and "out " in s for s in shown)
    assert all(float(s.split("out ")[1].split()[0]) > 0 for s in shown[1:])
    assert len(llm.engine.observers) == 0

    class Interrupted(Bar):
        def update(self, n: float | None = 1) -> bool | None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:  # whose traceback holds what was under way
        llm.generate("x", GREEDY, use_tqdm=Interrupted)
    assert caught and len(llm.engine.observers) == 0


def test_prefixes_are_forgotten(llm: LLM) -> None:
    prompt = "What the prefix cache has of this is forgotten when somebody says so. " * 4

    def cached() -> int:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    cached()
    assert cached() > 16
    assert llm.reset_prefix_cache() is True
    assert cached() == 0 and cached() > 16


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("of_running", [False, True])
def test_prefixes_may_be_forgotten_at_any_time(
    checkpoint: Path, of_running: bool, ahead: bool
) -> None:
    """Amid requests, which get what they get without."""
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 24, "block_size": 4}
    prompts = [[1, 2, 3] * n for n in range(2, 7)]
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=15, ignore_eos=True, logprobs=1)
    with LLM(checkpoint, async_scheduling=ahead, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        manager, engine = llm.engine.scheduler.block_manager, llm.engine
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        done, num_steps = {}, 0
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
            num_steps += 1
            if num_steps % 4 == 0:
                engine.reset_prefix_cache(reset_running_requests=of_running)
                assert not any(map(manager.prefix_cache.has, range(1, 25)))
        for number, output in enumerate(expected):
            assert done[str(number)].outputs == output.outputs
        assert manager.num_free_blocks == 24


def test_metrics_are_told_in_vllms_shape() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'nanoserve[serve]'")
    with LLM("tiny-qwen3", disable_log_stats=False, num_kv_blocks=99) as llm:
        llm.chat([QUESTION] * 3, GREEDY, use_tqdm=False)
        next(llm.stream("x")).finished  # noqa: B018  (dropped, and so aborted)
        by_name = {metric.name: metric for metric in llm.get_metrics()}
        totals = llm.stats
    tokens = by_name["vllm:prompt_tokens"]
    assert isinstance(tokens, compat.Counter) and tokens.value >= totals.num_prompt_tokens
    waiting = by_name["vllm:num_requests_waiting"]
    assert isinstance(waiting, compat.Gauge) and waiting.value == 0
    times = by_name["vllm:e2e_request_latency_seconds"]
    assert isinstance(times, compat.Histogram) and times.count == times.buckets["+Inf"] == 4
    assert times.sum > 0


def test_right_guesses_are_told_by_position() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'nanoserve[serve]'")
    options = {"speculative_config": {"method": "ngram"}, "disable_log_stats": False}
    with LLM("tiny-qwen3", num_kv_blocks=99, **options) as llm:
        llm.generate("one two one two one two one", SamplingParams(max_tokens=60), use_tqdm=False)
        (vector,) = (m for m in llm.get_metrics() if isinstance(m, compat.Vector))
        (drafts,) = (m for m in llm.get_metrics() if m.name.endswith("num_drafts"))
    assert len(vector.values) >= 1 and drafts.value >= vector.values[0]


def test_without_being_asked_nobody_counts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_an_engine_says_what_it_is(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    for told in (
        "'tiny-qwen3'",
        "float32",
        "cpu",
        "400 KV blocks of 16 tokens",
        "max_model_len 2048",
    ):
        assert told in repr(llm)
    assert llm.llm_engine is llm.engine
    caplog.set_level(logging.INFO, "nanoserve")
    LLM("tiny-qwen3", num_kv_blocks=50, dtype="float16").close()
    (line,) = (record.message for record in caplog.records if "loaded" in record.message)
    assert "50 KV blocks" in line and "dtype='bfloat16' or 'float32'" in line


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_that_is_missing_says_what_there_is(llm: LLM, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError) as caught:
        getattr(llm, name)
    assert str(caught.value) == f"'LLM' object has no attribute '{name}': {METHODS[name]}"
    with pytest.raises(AttributeError, match=r"no attribute 'generat'$"):
        _ = llm.generat


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_that_is_missing_says_what_there_is(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from nanoserve.compat import {name}")
    assert NAMES[name] in str(caught.value)


@pytest.mark.parametrize("name", sorted(FOREIGN_SPECULATION))
def test_vllms_names_of_guessing_are_known(name: str) -> None:
    _, neutral = FOREIGN_SPECULATION[name]
    plain = EngineConfig("m", speculative_config={"method": "ngram"})
    for value in (None, *neutral, *([object()] if not neutral else [])):
        config = {"method": "ngram", name: value}
        assert engine_config("m", {"speculative_config": config}) == plain
    if neutral:
        with pytest.raises(ValueError, match=f"{name}=.*is vLLM's and not supported"):
            engine_config("m", {"speculative_config": {"method": "ngram", name: "other"}})
    with pytest.raises(ValueError, match=r"'eagle3' is vLLM's.*'draft_model'"):
        engine_config("m", {"speculative_config": {"method": "eagle3", "model": "x"}})


def test_entries_of_a_prompt_that_are_none_are_not_there(llm: LLM) -> None:
    plain = llm.generate("x", GREEDY, use_tqdm=False)[0]
    given = {"prompt": "x", "multi_modal_data": None, "cache_salt": None}
    assert llm.generate(given, GREEDY, use_tqdm=False)[0].outputs == plain.outputs
    with pytest.raises(ValueError, match="multi_modal_data"):
        llm.generate({"prompt": "x", "multi_modal_data": {}}, GREEDY, use_tqdm=False)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", sorted(FOREIGN_PARAMETERS))
def test_every_parameter_of_vllms_is_known(name: str) -> None:
    told, has_no_effect = FOREIGN_PARAMETERS[name]
    for value in (None, *has_no_effect):
        assert SamplingParams(**{name: value}) == SamplingParams()
    with pytest.raises(ValueError, match=f"{name} is not supported: ") as caught:
        SamplingParams(**{name: object()})
    assert told in str(caught.value)


def test_as_many_best_ones_as_completions_are_all() -> None:
    assert SamplingParams(n=2, best_of=2) == SamplingParams(n=2)
    with pytest.raises(ValueError, match="best_of"):
        SamplingParams(n=2, best_of=3)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_new_tokens", "max_tokens"), ("repeat_penalty", "repetition_penalty"), ("topk", "top_k")],
)
def test_other_engines_names_are_translated(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}': did you mean {meant}"):
        SamplingParams(**{name: 1})


def test_parameters_are_copied_and_made_of_what_is_given() -> None:
    params = SamplingParams(stop=["a"], extra_args={"x": 1})
    copy = params.clone()
    assert (
        copy == params and copy.stop is not params.stop and copy.extra_args is not params.extra_args
    )
    given = SamplingParams.from_optional(temperature=0.5, top_p=None, n=None, best_of=None)
    assert given == SamplingParams(temperature=0.5)


def test_without_text_there_is_none(llm: LLM) -> None:
    expected = llm.generate("The KV cache", GREEDY, use_tqdm=False)[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    (output,) = llm.generate("The KV cache", params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.token_ids and text(output) == ""
    deltas = list(llm.stream("The KV cache", params))
    assert [i for d in deltas for i in d.outputs[0].token_ids] == expected.token_ids
    assert not any(map(text, deltas))
    with pytest.raises(ValueError, match="stop needs detokenize=True"):
        SamplingParams(detokenize=False, stop=["a"])


def test_all_log_probabilities_can_be_had(checkpoint: Path) -> None:
    """Those of the listed ids, and of the whole vocabulary, which add up to one."""
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 40}
    every = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
    listed = SamplingParams(temperature=0, max_tokens=4, logprob_token_ids=[7, 3, 299])
    with LLM(checkpoint, max_logprobs=-1, **options) as llm:
        whole, some, none = llm.generate([[1, 2, 3]] * 3, [every, listed, GREEDY], use_tqdm=False)
    assert none.outputs[0].logprobs is None
    for step in [*whole.outputs[0].logprobs, *whole.prompt_logprobs[1:]]:
        assert step.keys() == {*range(300)}
        total = torch.tensor([c.logprob for c in step.values()]).exp().sum().item()
        assert total == pytest.approx(1, abs=1e-4)
        assert sorted(c.rank for c in step.values()) == [*range(1, 301)]
    assert some.outputs[0].token_ids == whole.outputs[0].token_ids
    for token_id, step, full in zip(
        some.outputs[0].token_ids, some.outputs[0].logprobs, whole.outputs[0].logprobs, strict=True
    ):
        assert step.keys() == {token_id, 7, 3, 299}
        assert step == {key: full[key] for key in step}
    with LLM(checkpoint, **options) as llm:
        with pytest.raises(ValueError, match=r"logprobs=300 exceeds max_logprobs=20.*-1"):
            llm.generate([[1]], every, use_tqdm=False)
        with pytest.raises(ValueError, match="logprob_token_ids: token id 300"):
            llm.generate([[1]], SamplingParams(logprob_token_ids=[300]), use_tqdm=False)
        assert len(llm.generate([[1]], listed, use_tqdm=False)[0].outputs[0].logprobs) == 4


# ---------------------------------------------------------------- nano-vllm


def test_a_script_for_nano_vllm_runs(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_checkpoint("tiny-qwen3"))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in ("What is a KV cache?", "What is 12 + 30?")
    ]
    own = {"kvcache_block_size": 16, "num_kvcache_blocks": 400}
    with LLM("tiny-qwen3", enforce_eager=True, tensor_parallel_size=1, **own) as nano:
        outputs = nano.generate(prompts, SamplingParams(temperature=0.6, max_tokens=64))
        ids = [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in prompts]
        again = nano.generate([i["prompt_token_ids"] for i in ids], GREEDY, use_tqdm=False)
    assert "42" in outputs[1]["text"] and outputs[0]["token_ids"] == outputs[0].outputs[0].token_ids
    assert all(output["text"] for output in again)
    with pytest.raises(KeyError, match="'text' and 'token_ids'"):
        outputs[0]["prompt"]


def test_text_that_the_model_has_no_rows_for_is_told_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_checkpoint("tiny-qwen3"))
    tokenizer.add_tokens(["MYWORD"])
    make_qwen3(tmp_path, vocab_size=2048)
    tokenizer.save_pretrained(tmp_path)
    with LLM(tmp_path, num_kv_blocks=20) as llm:
        assert "has more tokens than the model" in caplog.text
        told = r"the tokenizer has more tokens than the model: token id 20\d\d"
        with pytest.raises(ValueError, match=told):
            llm.generate("MYWORD hello", use_tqdm=False)
        with pytest.raises(ValueError, match=r"^token id 2048"):
            llm.generate([[2048]], use_tqdm=False)


def test_arguments_have_help() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert "--max-num-seqs" in parser.format_help() and "--model" in parser.format_help()


def test_the_former_name_warns_and_is_the_same_module() -> None:
    code = (
        "import warnings; warnings.simplefilter('error'); import nanoserve.compat\n"
        "try: from nanoserve.drop_in import LLM\n"
        "except DeprecationWarning as warning: print(warning)\n"
        "warnings.simplefilter('ignore'); import nanoserve.drop_in\n"
        "from nanoserve.drop_in import SamplingParams as ours\n"
        "print(nanoserve.compat.SamplingParams is ours)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    warning, is_same = shown.stdout.splitlines()
    assert "nanoserve.drop_in is now nanoserve.compat" in warning and is_same == "True"
