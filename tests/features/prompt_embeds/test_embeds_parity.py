"""Prompts of embeddings give the tokens of transformers' `generate(inputs_embeds=...)`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from embedded_prompts import (
    embeddings_of,
    expected_tokens,
    filled,
    greedy,
    mixed_prompts,
    random_rows,
    tokens_of,
)
from real_texts import TEXTS
from smollm2 import IN_FLOATS, LENGTH, require_smollm2, smollm2_file
from tiny_checkpoints import (
    DEEPSEEK_V2,
    DELTA,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    SMOLLM3,
    make_checkpoint,
    make_qwen3,
)

from nanoserve import LLM

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prompt_embeds": True,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "num_kv_blocks": 80,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen2": {},
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 9, "num_hidden_layers": 3},
    "Gemma2": GEMMA2,
    "Gemma3": GEMMA3,
    "Granite": GRANITE,
    "Phi3": {"head_dim": 12},
    "SmolLM3": SMOLLM3,
    "Qwen3Moe": MOE,
    "DeepseekV2": DEEPSEEK_V2,
    "GptOss": GPT_OSS,
    "Qwen3_5": DELTA,
}


def logprobs_of(llm: LLM, prompts: list[Any]) -> list[list[float]]:
    """Return the log-probabilities of the first token, of the same 300 tokens."""
    outputs = llm.generate(prompts, greedy(1, logprobs=300), use_tqdm=False)
    entries = [output.outputs[0].logprobs[0] for output in outputs]
    return [[entry[token].logprob for token in range(300)] for entry in entries]


@pytest.mark.small(family=["Qwen3", "Gemma2", "Granite"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_continue_as_in_transformers(family: str, tmp_path: Path) -> None:
    """Gemma's are scaled before, as in its `embed_tokens`; Granite's are scaled by the model."""
    name = {"Gemma3": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    reference = make_checkpoint(getattr(transformers, name), tmp_path, **FAMILIES[family])
    prompts = mixed_prompts(reference)
    with LLM(str(tmp_path), max_logprobs=-1, **OPTIONS) as llm:
        found = tokens_of(llm, prompts)
        logprobs = logprobs_of(llm, prompts)
    for prompt, tokens, first in zip(prompts, found, logprobs, strict=True):
        with torch.no_grad():
            logits = reference(inputs_embeds=filled(reference, prompt)[None]).logits[0, -1]
        torch.testing.assert_close(
            torch.tensor(first), logits.log_softmax(-1), rtol=1e-4, atol=1e-4
        )
        assert tokens == expected_tokens(reference, prompt)


@pytest.mark.small(family=["Qwen3", "Gemma3"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma2", "Gemma3", "Granite"])
def test_the_models_own_embeddings_are_its_tokens(family: str, tmp_path: Path) -> None:
    name = f"{family}ForCausalLM"
    reference = make_checkpoint(getattr(transformers, name), tmp_path, **FAMILIES[family])
    ids = torch.randint(0, 300, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    own = embeddings_of(reference, ids)
    other_ids = [*ids[:9], *[17] * 20, *ids[29:]]  # 17: placeholders
    prompts: list[Any] = [
        {"prompt_embeds": own},
        {"prompt_embeds": own[None]},  # as transformers takes it
        {"prompt_token_ids": other_ids, "prompt_embeds_pieces": [(9, own[9:29])]},
    ]
    options = OPTIONS | {"enable_prefix_caching": False, "max_num_seqs": 1}
    with LLM(str(tmp_path), max_logprobs=-1, **options) as llm:
        expected, *found = tokens_of(llm, [{"prompt_token_ids": ids}, *prompts])
        first, *others = logprobs_of(llm, [ids, *prompts])
    assert found == [expected] * 3
    assert others == [first] * 3  # to the bit: the steps are the same


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_embeddings_are_rounded_to_the_models_dtype(dtype: str, tmp_path: Path) -> None:
    reference = make_qwen3(tmp_path)
    rows = random_rows(reference, 30)
    options = OPTIONS | {"dtype": dtype, "attention_backend": "torch"}
    with LLM(str(tmp_path), max_logprobs=-1, **options) as llm:
        rounded = rows.to(getattr(torch, dtype))
        prompts = [{"prompt_embeds": rows}, {"prompt_embeds": rounded}]
        first, second = logprobs_of(llm, prompts)
        (output,) = llm.generate(prompts[1], greedy(1), use_tqdm=False)
    assert first == second and output.num_cached_tokens == 16  # equal after rounding: a hit
    with torch.no_grad():
        logits = reference(inputs_embeds=rows[None]).logits[0, -1]
    torch.testing.assert_close(torch.tensor(first), logits.log_softmax(-1), rtol=0.1, atol=0.3)


@pytest.mark.size("full")
def test_a_real_model_continues_from_embeddings() -> None:
    require_smollm2()
    file = smollm2_file()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32"
    ).eval()
    reference.generation_config.eos_token_id = None  # we ignore it, too
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [text[:400] for text in [*TEXTS.values()][:3]]
    options = LENGTH | IN_FLOATS | {"max_num_batched_tokens": 100, "enable_prompt_embeds": True}
    with LLM("smollm2", **options) as llm:
        for seed, text in enumerate(texts):
            ids = tokenizer(text).input_ids
            own = embeddings_of(reference, ids)
            start = len(ids) // 3
            piece = own[start : start + 20] + 0.5 * random_rows(reference, 20, seed)
            prompts = [
                {"prompt_embeds": own},
                {"prompt_token_ids": ids, "prompt_embeds_pieces": [(start, piece)]},
            ]
            of_text, *found = tokens_of(llm, [{"prompt_token_ids": ids}, *prompts], greedy(24))
            assert found[0] == of_text
            for tokens, prompt in zip(found, prompts, strict=True):
                assert tokens == expected_tokens(reference, prompt, 24)
