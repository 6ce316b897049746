"""The engines that bench.py measures nanoserve against, and the weights that all of them load.

Each `load_...(spec)` returns a function: prompts and output lengths in; every output's tokens, and
a line for the report, out. A peer's packages are imported when it is loaded, not before.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

Tokens = list[list[int]]
Generate = Callable[[Tokens, list[int]], tuple[Tokens, str]]

_BLOCK = 256  # tokens: transformers' own choice for its KV blocks
_BATCH_TOKENS = 8192  # and for a step


def write_weights(spec: Namespace) -> dict[str, Any]:
    """Fill the folder `spec.model`, which has a config.json, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(spec.model)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(spec.model)
    return {}


def load_transformers(spec: Namespace) -> Generate:
    """transformers' `generate` at the best that static batches allow: sorted by output length.

    A batch runs until its longest output is complete. What the other rows generate meanwhile was
    not asked for and does not count: that is what static batching costs. Sorting, for which one
    must know every length in advance, keeps the cost as small as it can be.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    model, generation_config = _transformers_model(spec)
    model.generation_config = generation_config

    def generate(prompts: Tokens, output_lens: list[int]) -> tuple[Tokens, str]:
        order = sorted(range(len(prompts)), key=output_lens.__getitem__)
        outputs, num_generated, size = [[]] * len(prompts), 0, spec.hf_batch_size
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            longest = output_lens[batch[-1]]
            rows = [torch.tensor(prompts[i]) for i in batch]
            # Left padding, so that all rows go on at the same column; positions count the mask.
            ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
            ids = ids.to(spec.device)
            inputs = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
            tokens = model.generate(**inputs, max_new_tokens=longest)[:, ids.shape[1] :].tolist()
            num_generated += len(batch) * longest
            for i, row in zip(batch, tokens, strict=True):
                outputs[i] = row[: output_lens[i]]
        return outputs, f"static batches of {size}, {num_generated} tokens generated"

    return generate


def load_transformers_cb(spec: Namespace) -> Generate:
    """transformers' continuous batching, with KV blocks enough for all sequences at once.

    `generate_batch` knows one output length for all requests; its manager takes one for each. The
    manager is kept from the warm-up to the measured run, and with it its cache and CUDA graphs.
    """
    from transformers import ContinuousBatchingConfig

    model, generation_config = _transformers_model(spec)
    generation_config.eos_token_id = -1  # which it takes for none
    batch_tokens = spec.max_num_batched_tokens or _BATCH_TOKENS
    total_lens = map(sum, zip(map(len, spec.prompts), spec.output_lens, strict=True))
    num_blocks = sum(-(-n // _BLOCK) for n in total_lens)
    # It admits nobody while less than 15 % of the blocks are free, and warms up with a full step.
    num_blocks = 5 * num_blocks // 4 + 2 * -(-batch_tokens // _BLOCK)
    config = ContinuousBatchingConfig(
        num_blocks=num_blocks,
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=spec.max_num_seqs,
    )

    def generate(prompts: Tokens, output_lens: list[int]) -> tuple[Tokens, str]:
        outputs: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config, continuous_batching_config=config, persistent_manager=True
        ) as manager:
            for i, (prompt, n) in enumerate(zip(prompts, output_lens, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=n)
            while len(outputs) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                if result is not None and result.is_finished():
                    outputs[result.request_id] = result.generated_tokens
            attention = model.config._attn_implementation
        tokens = [outputs[str(i)] for i in range(len(prompts))]
        return tokens, f"{num_blocks} KV blocks, steps of {batch_tokens} tokens, {attention}"

    return generate


def _transformers_model(spec: Namespace) -> "tuple[PreTrainedModel, GenerationConfig]":
    """The model, and settings in place of the checkpoint's own, whose EOS would end outputs."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = getattr(torch, spec.dtype)
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype).to(spec.device)
    sampling = {"do_sample": True, "temperature": spec.temperature, "top_k": 0}
    generation_config = GenerationConfig(
        eos_token_id=None, pad_token_id=0, **(sampling if spec.temperature else {})
    )
    return model, generation_config


PEERS: dict[str, Callable[[Namespace], Generate]] = {
    "transformers": load_transformers,
    "transformers-cb": load_transformers_cb,
}
