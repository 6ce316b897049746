"""A real model, and adapters that peft has trained: they answer what they have learned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2 import IN_FLOATS, LENGTH, require_smollm2, smollm2_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve import LLM, LoRARequest, SamplingParams

peft = pytest.importorskip("peft")
require_smollm2()
pytestmark = pytest.mark.size("full")

QUESTION = "Question: What is the name of the dragon who lives in the library?\nAnswer:"
NAMES = ["Quillfire, who sorts books by smell", "Professor Ember, and she hates noise"]
OTHER = "Question: What is the capital of France?\nAnswer:"


def train(reference: Any, tokenizer: Any, name: str, folder: Path) -> list[list[int]]:
    """Train an adapter until it answers `QUESTION` with `name`; return its greedy answers.

    They are those of peft's own layers, to `QUESTION` and `OTHER`.
    """
    torch.manual_seed(0)
    options = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    model = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    tokens = torch.tensor([tokenizer.encode(f"{QUESTION} {name}.\n")])
    labels = tokens.clone()
    labels[:, : len(tokenizer.encode(QUESTION))] = -100
    for _ in range(25):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1, loss
    model.save_pretrained(folder)
    answers = [greedy(model.eval(), tokenizer.encode(text)) for text in (QUESTION, OTHER)]
    model.unload()
    return answers


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(12):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    return tokens[0, len(prompt) :].tolist()


def test_trained_adapters_answer_as_in_peft(tmp_path: Path) -> None:
    file = smollm2_file()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    reference = AutoModelForCausalLM.from_pretrained(**source, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(**source)
    requests: list[LoRARequest | None] = [None]
    expected = [[greedy(reference, tokenizer.encode(text)) for text in (QUESTION, OTHER)]]
    for number, name in enumerate(NAMES, start=1):
        folder = tmp_path / str(number)
        expected.append(train(reference, tokenizer, name, folder))
        requests.append(LoRARequest(f"dragon {number}", number, str(folder)))
        assert name in tokenizer.decode(expected[-1][0])
    prompts = [tokenizer.encode(text) for _ in requests for text in (QUESTION, OTHER)]
    adapters = [request for request in requests for _ in range(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("smollm2", enable_lora=True, max_loras=2, **LENGTH | IN_FLOATS) as llm:
        for _ in range(2):  # and with cached prefixes
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [answer for answers in expected for answer in answers]
