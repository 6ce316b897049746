"""Greedy outputs of the engine against one forward pass of transformers for each of them."""

from typing import Any

import torch

from nanoserve import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@torch.inference_mode()
def assert_like(model: Any, llm: LLM, prompts: list[list[int]]) -> None:
    """Greedy tokens and their log-probabilities, to 1e-4, are those of transformers' `model`."""
    for output in llm.generate(prompts, PARAMS, use_tqdm=False):
        (completion,) = output.outputs
        assert completion.finish_reason == "length", completion
        ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
        logprobs = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = logprobs[len(output.prompt_token_ids) - 1 : -1]
        assert completion.token_ids == expected.argmax(-1).tolist()
        rows = zip(completion.logprobs, completion.token_ids, strict=True)
        found = [row[token].logprob for row, token in rows]
        torch.testing.assert_close(torch.tensor(found), expected.max(-1).values, atol=1e-4, rtol=0)
