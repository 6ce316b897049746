"""Whatever cannot work is a ValueError that says why, and the engine goes on as if never asked."""

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig

VOCAB_SIZE = 300
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_kv_blocks": 16,
    "max_model_len": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
PROMPT = [1, 2, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def complete(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def finish(llm: LLM) -> dict[str, list[int]]:
    tokens = {}
    while llm.engine.has_unfinished_requests():
        for out in llm.engine.step():
            tokens[out.request_id] = out.outputs[0].token_ids
    return tokens


@dataclass
class Rig:
    llm: LLM
    expected: list[int]  # transformers' greedy continuation of PROMPT

    @contextmanager
    def refuses(self, *told: object) -> Iterator[None]:
        """The block raises a ValueError that contains all of `told`, and leaves no trace."""
        num_steps = self.llm.stats.num_steps
        with pytest.raises(ValueError) as caught:
            yield
        for part in told:
            assert str(part) in str(caught.value)
        assert self.llm.stats.num_steps == num_steps
        self.check_idle()
        assert complete(self.llm, PROMPT) == [self.expected]

    def check_idle(self) -> None:
        assert not self.llm.engine.has_unfinished_requests()
        manager = self.llm.engine.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_qwen3(path)
    return path


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("rig")
    model = make_qwen3(path)
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)
    with LLM(path, **OPTIONS) as llm:
        yield Rig(llm, output[0, len(PROMPT) :].tolist())


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, for a test to spoil."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


# ---------------------------------------------------------------- prompts

BAD_PROMPTS = {
    "empty": ([], ["empty"]),
    "empty dictionary": ({}, ["prompt_token_ids"]),
    "empty ids in a dictionary": ({"prompt_token_ids": []}, ["empty"]),
    "misspelt key": ({"prompts": [1]}, ["'prompts'"]),
    "no ids": ({"prompt_token_ids": None}, ["NoneType"]),
    "negative": ([1, -1], ["-1", VOCAB_SIZE]),
    "beyond the vocabulary": ([1, VOCAB_SIZE], [f"id {VOCAB_SIZE}", f"{VOCAB_SIZE})"]),
    "float": ([1, 2.5], ["2.5", VOCAB_SIZE]),
    "whole float": ([1.0], ["1.0", VOCAB_SIZE]),
    "bool": ([True], ["True", VOCAB_SIZE]),
    "numpy bool": (np.array([True]), ["True", VOCAB_SIZE]),
    "string": ([1, "2"], ["'2'", VOCAB_SIZE]),
    "None among ids": ([1, None], ["None", VOCAB_SIZE]),
    "nested": ([[1, 2]], ["[1, 2]"]),
    "None": (None, ["NoneType"]),
    "bytes": (b"abc", ["bytes"]),
    "a number": (5, ["int"]),
    "a numpy number": (np.float64(1.5), ["float64"]),
    "as long as max_model_len": (list(range(32)), ["32 tokens", "max_model_len=32", "31"]),
    "longer than max_model_len": (list(range(40)), ["40 tokens", "max_model_len=32", "31"]),
    "text without a tokenizer": ("hello", ["tokenizer"]),
    "text in a dictionary": ({"prompt": "hello"}, ["tokenizer"]),
    "empty text without a tokenizer": ("", ["tokenizer"]),
    "empty salt": ({"prompt_token_ids": [1], "cache_salt": ""}, ["cache_salt=''"]),
    "number for a salt": ({"prompt_token_ids": [1], "cache_salt": 5}, ["cache_salt=5", "string"]),
    "bytes for a salt": ({"prompt_token_ids": [1], "cache_salt": b"a"}, ["cache_salt=b'a'"]),
    "list for a salt": ({"prompt_token_ids": [1], "cache_salt": ["a"]}, ["cache_salt=['a']"]),
    "False for a salt": ({"prompt_token_ids": [1], "cache_salt": False}, ["cache_salt=False"]),
    "nothing but a salt": ({"cache_salt": "a"}, ["NoneType"]),
    "misspelt salt": ({"prompt_token_ids": [1], "cache_sal": "a"}, ["'cache_sal'"]),
}


@pytest.mark.parametrize("entry", ["generate", "add_request"])
@pytest.mark.parametrize(("prompt", "told"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused(rig: Rig, prompt: Any, told: list[object], entry: str) -> None:
    with rig.refuses(*told):
        if entry == "generate":
            complete(rig.llm, [PROMPT, prompt, [4]])
        else:
            rig.llm.engine.add_request("bad", prompt, GREEDY)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([[]], "empty"),
        ({}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "-1"),
        ("hello", "tokenizer"),
        (b"abc", "bytes"),
        ([1, 2.5], "2.5"),
        (5, "int"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_a_bad_argument_in_place_of_prompts_is_refused(rig: Rig, prompts: Any, told: str) -> None:
    with rig.refuses(told):
        complete(rig.llm, prompts)


def test_the_longest_prompt_that_fits_gets_one_token(rig: Rig) -> None:
    (out,) = rig.llm.generate(list(range(31)), GREEDY, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 1 and out.outputs[0].finish_reason == "length"


def test_chat_without_a_tokenizer_is_refused(rig: Rig) -> None:
    with rig.refuses("tokenizer"):
        rig.llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)


def test_a_refused_call_does_not_change_what_later_requests_draw(checkpoint: Path) -> None:
    def draw(refuse: bool) -> list[list[int]]:
        with LLM(checkpoint, seed=7, **OPTIONS) as llm:
            if refuse:
                with pytest.raises(ValueError):
                    complete(llm, [PROMPT, PROMPT, [-1]])
            return complete(llm, [PROMPT, PROMPT], SamplingParams(max_tokens=8))

    assert draw(refuse=True) == draw(refuse=False)


# ---------------------------------------------------------------- sampling parameters


@pytest.mark.parametrize("name", ["top_p", "temperature"])
def test_parameters_spoilt_after_construction_are_refused(rig: Rig, name: str) -> None:
    params = SamplingParams(max_tokens=2)
    setattr(params, name, math.nan)
    with rig.refuses(f"{name}=nan"):
        complete(rig.llm, PROMPT, params)


def test_top_k_of_0_and_minus_1_are_both_off(rig: Rig) -> None:
    def draw(top_k: int) -> list[list[int]]:
        return complete(rig.llm, PROMPT, SamplingParams(top_k=top_k, seed=3, max_tokens=20))

    assert draw(0) == draw(-1) == draw(VOCAB_SIZE) != draw(1)


def test_numpy_numbers_are_as_good_as_pythons(rig: Rig) -> None:
    def draw(integer: type, number: type) -> list[list[int]]:
        params = SamplingParams(
            temperature=number(0.5),
            top_p=number(0.75),
            min_p=number(0.125),
            top_k=integer(40),
            seed=integer(3),
            max_tokens=integer(9),
            stop_token_ids=[integer(299)],
        )
        return complete(rig.llm, PROMPT, params)

    expected = draw(int, float)
    assert draw(np.int64, np.float32) == expected
    assert draw(np.int32, np.float64) == expected


def test_small_numpy_integers_do_not_overflow(rig: Rig) -> None:
    """The prompt and 127 further tokens are more than an int8 can count."""
    small = {name: np.int8(127) for name in ("max_tokens", "min_tokens", "top_k", "seed")}
    params = SamplingParams(**small, stop_token_ids=[np.int8(7)], logit_bias={np.int8(8): 1})
    assert {type(getattr(params, name)) for name in small} == {int}
    assert [*map(type, params.stop_token_ids), *map(type, params.logit_bias)] == [int, int]
    limit = rig.llm.engine.input_processor.max_model_len - len(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=np.int8(127), ignore_eos=True)
    assert [len(tokens) for tokens in complete(rig.llm, PROMPT, params)] == [min(127, limit)]


@pytest.mark.parametrize("stop_token_id", [-1, VOCAB_SIZE])
def test_a_stop_token_outside_the_vocabulary_is_refused(rig: Rig, stop_token_id: int) -> None:
    with rig.refuses(stop_token_id, VOCAB_SIZE):
        complete(rig.llm, PROMPT, SamplingParams(stop_token_ids=[stop_token_id]))


@pytest.mark.parametrize("num_params", [0, 1, 3])
def test_another_number_of_sampling_params_than_prompts_is_refused(
    rig: Rig, num_params: int
) -> None:
    with rig.refuses("2 prompts", num_params):
        complete(rig.llm, [PROMPT, PROMPT], [GREEDY] * num_params)


@pytest.mark.parametrize("params", [{"temperature": 0}, ["greedy"], 0.5])
def test_sampling_params_of_another_type_are_refused(rig: Rig, params: Any) -> None:
    with rig.refuses("SamplingParams"):
        complete(rig.llm, PROMPT, params)


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5])
def test_the_engine_refuses_params_of_another_type(rig: Rig, params: Any) -> None:
    with rig.refuses("SamplingParams", type(params).__name__):
        rig.llm.engine.add_request("bad", PROMPT, params)


@pytest.mark.parametrize("request_id", [5, None, ["a"]])
def test_a_request_id_that_is_no_string_is_refused(rig: Rig, request_id: Any) -> None:
    with rig.refuses("request_id"):
        rig.llm.engine.add_request(request_id, PROMPT)


# ---------------------------------------------------------------- the engine's state


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on(rig: Rig) -> None:
    engine = rig.llm.engine
    engine.add_request("twin", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="'twin'"):
        engine.add_request("twin", [4, 5], GREEDY)
    assert finish(rig.llm) == {"twin": rig.expected}
    engine.add_request("twin", PROMPT, GREEDY)  # a finished request gives its id back
    assert finish(rig.llm) == {"twin": rig.expected}
    rig.check_idle()


def test_generate_is_refused_while_added_requests_are_unfinished(rig: Rig) -> None:
    rig.llm.engine.add_request("mine", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="unfinished"):
        complete(rig.llm, [4, 5])
    assert finish(rig.llm) == {"mine": rig.expected}
    rig.check_idle()
    assert complete(rig.llm, PROMPT) == [rig.expected]


def test_a_closed_engine_refuses_requests_and_has_dropped_its_own(checkpoint: Path) -> None:
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.engine.add_request("pending", PROMPT, GREEDY)
        llm.engine.step()
    Rig(llm, []).check_idle()
    with pytest.raises(ValueError, match="closed"):
        complete(llm, PROMPT)
    with pytest.raises(ValueError, match="closed"):
        llm.engine.add_request("late", PROMPT, GREEDY)
    assert llm.engine.step() == []
    llm.close()  # twice is once


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_model_len": 65}, ["max_model_len=65", "16 KV blocks of 4", "64 tokens"]),
        ({"max_model_len": 513, "num_kv_blocks": 1000}, ["max_model_len=513", "512"]),
        ({"max_model_len": 0}, ["max_model_len=0", ">= 2"]),
        ({"max_model_len": 16.0}, ["max_model_len=16.0", "integer"]),
        ({"max_num_batched_tokens": 3}, ["max_num_batched_tokens=3", "max_num_seqs=4"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", ">= 1"]),
        ({"max_num_seqs": True}, ["max_num_seqs=True", "integer"]),
        ({"block_size": 0}, ["block_size=0", ">= 1"]),
        ({"num_kv_blocks": 0}, ["num_kv_blocks=0", ">= 1"]),
        ({"kv_cache_memory_bytes": 10**6}, ["num_kv_blocks=16", "kv_cache_memory_bytes=1000000"]),
        (
            # One block: 2 x 2 layers x 2 heads x 16 values x 4 bytes x 4 tokens.
            {"num_kv_blocks": None, "kv_cache_memory_bytes": 4095},
            ["kv_cache_memory_bytes=4095", "2048"],
        ),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold=-1", ">= 0"]),
        ({"seed": -1}, ["seed=-1", ">= 0"]),
        ({"prefix_cache_seed": "x"}, ["prefix_cache_seed='x'", "integer"]),
        ({"dtype": "float64"}, ["dtype='float64'", "'bfloat16'"]),
        ({"dtype": torch.float64}, ["dtype='float64'", "'float32'"]),
        ({"load_format": "pickle"}, ["load_format='pickle'", "'safetensors'"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy='lifo'", "'fcfs'", "'priority'"]),
        ({"priority_aging": 0, "scheduling_policy": "priority"}, ["priority_aging=0", ">= 1"]),
        ({"priority_aging": 5}, ["priority_aging=5", "scheduling_policy='priority'"]),
        ({"attention_backend": "magic"}, ["attention_backend='magic'", "'torch'"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization=1.5", "(0, 1]"]),
        ({"gpu_memory_utilization": math.nan}, ["gpu_memory_utilization=nan", "(0, 1]"]),
        ({"gpu_memory_utilization": "0.9"}, ["gpu_memory_utilization='0.9'", "(0, 1]"]),
        ({"enable_prefix_caching": "false"}, ["enable_prefix_caching='false'"]),
        ({"enable_prompt_tokens_details": 0}, ["enable_prompt_tokens_details=0"]),
        ({"tensor_parallel_size": 2.0}, ["tensor_parallel_size=2.0"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size=0"]),
        ({"revision": ""}, ["revision=''", "commit"]),
        ({"revision": 3}, ["revision=3", "commit"]),
        ({"download_dir": 3}, ["download_dir=3", "folder"]),
        ({"tokenizer": 3}, ["tokenizer=3", "folder"]),
        ({"trust_remote_code": "no"}, ["trust_remote_code='no'"]),
        ({"max_model_length": 32}, ["max_model_length", "max_model_len"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_option_is_refused(
    checkpoint: Path, options: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        LLM(checkpoint, **OPTIONS | options)
    for part in told:
        assert part in str(caught.value)


def test_limits_that_just_fit_are_accepted() -> None:
    config = EngineConfig("none", max_model_len=64, block_size=4, max_num_seqs=4)
    assert config.resolve_max_model_len(model_limit=64, num_kv_blocks=16) == 64
    EngineConfig("none", max_num_seqs=4, max_num_batched_tokens=4)
    EngineConfig("none", gpu_memory_utilization=1)


def test_a_default_max_model_len_is_lowered_to_the_pool_and_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | {"max_model_len": None}
    with caplog.at_level(logging.WARNING), LLM(checkpoint, **options) as llm:
        assert llm.engine.executor.max_model_len == 64
        assert "lowered from 512 to 64" in caplog.text
        with pytest.raises(ValueError, match="max_model_len=64"):
            complete(llm, list(range(64)))
        assert len(complete(llm, list(range(63)))[0]) == 1


def test_a_default_max_model_len_that_fits_is_the_models_and_not_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | {"max_model_len": None, "num_kv_blocks": 128}
    with caplog.at_level(logging.WARNING), LLM(checkpoint, **options) as llm:
        assert llm.engine.executor.max_model_len == 512
    assert "lowered" not in caplog.text


# ---------------------------------------------------------------- checkpoints


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        LLM(tmp_path / "nowhere", **OPTIONS)


def test_a_file_in_place_of_a_folder_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(checkpoint / "config.json", **OPTIONS)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json") as caught:
        LLM(tmp_path, **OPTIONS)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\N{SNOWMAN}"])
def test_a_config_that_is_no_json_object_is_refused(broken: Path, name: str, content: str) -> None:
    (broken / name).write_text(content, encoding="utf-16")
    if content != "\N{SNOWMAN}":  # which stays in an encoding that is not UTF-8
        (broken / name).write_text(content)
    with pytest.raises(ValueError) as caught:
        LLM(broken, **OPTIONS)
    assert str(broken / name) in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused_unless_none_is_wanted(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        LLM(checkpoint, **OPTIONS | {"skip_tokenizer_init": False})


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MambaForCausalLM"]},
        # A foreign config lacks what Qwen3 needs; the architecture is the news, not the first gap.
        {"architectures": ["MambaForCausalLM"], "head_dim": ..., "num_attention_heads": ...},
        {"architectures": ["MambaForCausalLM"], "hidden_act": "gelu"},
    ],
)
def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    broken: Path, changes: dict[str, Any]
) -> None:
    edit_json(broken / "config.json", **changes)
    with pytest.raises(ValueError) as caught:
        LLM(broken, **OPTIONS)
    assert "MambaForCausalLM" in str(caught.value) and "Qwen3ForCausalLM" in str(caught.value)


def test_a_config_without_an_architecture_is_refused(broken: Path) -> None:
    edit_json(broken / "config.json", architectures=...)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        LLM(broken, **OPTIONS)


MROPE = {"rope_type": "mrope", "mrope_section": [2, 3, 3]}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
UNIMPLEMENTED = {
    "mrope, v5": ({"rope_parameters": MROPE | {"rope_theta": 1e4}}, "'mrope'"),
    "mrope, v4": ({"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": MROPE}, "'mrope'"),
    "mrope, early v4": (
        {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "mrope"}},
        "'mrope'",
    ),
    # transformers lets rope_scaling win.
    "mrope, v4 in v5": ({"rope_scaling": MROPE}, "'mrope'"),
    "RoPE per type of layer": (
        {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}},
        "sliding_attention",
    ),
    "partial RoPE": ({"rope_parameters": LOCAL | {"partial_rotary_factor": 0.5}}, "0.5"),
    "another type of layer": ({"layer_types": ["full_attention", "conv"]}, "conv"),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
}


@pytest.mark.parametrize(("changes", "told"), UNIMPLEMENTED.values(), ids=UNIMPLEMENTED)
def test_what_the_model_does_not_implement_is_refused(
    broken: Path, changes: dict[str, Any], told: str
) -> None:
    edit_json(broken / "config.json", **changes)
    with pytest.raises(ValueError) as caught:
        LLM(broken, **OPTIONS)
    assert told in str(caught.value) and "not supported" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta"),
        ({"vocab_size": "300"}, "vocab_size"),
        ({"hidden_size": 48.0}, "hidden_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window=False"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers=2"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [1.5]}, "eos_token_id"),
    ],
    ids=str,
)
def test_a_config_value_that_makes_no_sense_is_refused_by_name(
    broken: Path, changes: dict[str, Any], told: str
) -> None:
    edit_json(broken / "config.json", **changes)
    with pytest.raises(ValueError) as caught:
        LLM(broken, **OPTIONS)
    assert told in str(caught.value)


@pytest.mark.parametrize("temperature", ["0.7", -1, math.nan])
def test_a_bad_recommendation_in_generation_config_is_refused(
    broken: Path, temperature: Any
) -> None:
    edit_json(broken / "generation_config.json", temperature=temperature)
    with pytest.raises(ValueError, match="temperature"):
        LLM(broken, **OPTIONS).get_default_sampling_params()
