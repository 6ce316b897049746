"""Run transformers with `generate` in static batches, and with its continuous batching.

Options of these engines, such as attn_implementation, are passed to `from_pretrained`.
"""

import shutil
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from . import Engine, Tokens, total_lens

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager

_BLOCK = 256  # tokens per KV block, the default of transformers
_BATCH_TOKENS = 8192  # tokens per step, also its default
_STATIC_BATCH = 16


def write_weights(spec: Namespace) -> dict[str, Any]:
    """Write random weights to the folder `spec.model`, which has a config.json.

    The tokenizer of the bundled model is copied there, since some engines need one to be present.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    config = AutoConfig.from_pretrained(spec.model)
    with torch.device(spec.device):  # fast on a GPU
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(spec.model)
    for file in Path(spec.tokenizer).glob("tokenizer*.json"):
        shutil.copy(file, spec.model)
    return {}


class _TransformersEngine(Engine):
    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        torch.set_num_threads(spec.threads)
        dtype = getattr(torch, spec.dtype)
        path = Path(spec.model)
        if path.is_file():  # a GGUF file, whose weights are converted to floats
            options, path = options | {"gguf_file": path.name}, path.parent
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        self.model, self.spec = model.to(spec.device), spec
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        # These replace the checkpoint's settings, whose EOS would end outputs.
        sampling = {"do_sample": True, "temperature": spec.temperature, "top_k": 0}
        self.generation_config = GenerationConfig(
            eos_token_id=None, pad_token_id=0, **(sampling if spec.temperature else {})
        )


class StaticBatches(_TransformersEngine):
    """Runs transformers' `generate` in the best static batches, sorted by output length.

    A batch runs until its longest output is complete. Tokens that its other rows generate meanwhile
    are not counted, which is the cost of static batching. Sorting, which needs all lengths in
    advance, minimises it.
    """

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        super().__init__(spec, options)
        self.num_generated = 0
        self.model.generation_config = self.generation_config
        self.batch_size = spec.hf_batch_size or spec.max_num_seqs or _STATIC_BATCH

    def begin(self) -> None:
        self.num_generated = 0

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        order = sorted(range(len(prompts)), key=output_lens.__getitem__)
        outputs: Tokens = [[]] * len(prompts)
        size = self.batch_size
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            longest_output = output_lens[batch[-1]]
            rows = [torch.tensor(prompts[i]) for i in batch]
            # Left padding, so that all rows continue at the same column; positions follow the mask.
            ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
            ids = ids.to(self.spec.device)
            inputs = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
            tokens = self.model.generate(**inputs, max_new_tokens=longest_output)
            self.num_generated += len(batch) * longest_output
            for i, row in zip(batch, tokens[:, ids.shape[1] :].tolist(), strict=True):
                outputs[i] = row[: output_lens[i]]
        return outputs

    def facts(self) -> dict[str, Any]:
        return {"static batches of": self.batch_size, "tokens generated": self.num_generated}


class ContinuousBatches(_TransformersEngine):
    """Runs transformers' continuous batching, with enough KV blocks for all sequences at once.

    `generate_batch` has one output length for all requests; its manager takes one per request. The
    manager, with its cache and CUDA graphs, is kept from the warm-up to the measured run.
    """

    is_online = True

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        super().__init__(spec, options)
        self.generation_config.eos_token_id = -1  # which means none
        self.batch_tokens = spec.max_num_batched_tokens or _BATCH_TOKENS
        num_blocks = sum(-(-n // _BLOCK) for n in total_lens(spec))
        # It admits no request while less than 15 % of the blocks are free; a step warms it up.
        self.num_blocks = 5 * num_blocks // 4 + 2 * -(-self.batch_tokens // _BLOCK)
        self._online = ExitStack()
        self._manager: Any = None  # a ContinuousBatchingManager from `begin` on
        self._num_seen: dict[int, int] = {}

    def begin(self) -> None:
        if self.spec.arrivals:  # its thread runs all the time, as in a server
            self._manager = self._online.enter_context(self._session())

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        outputs: Tokens = [[] for _ in prompts]
        with self._session() as manager:
            for i, (prompt, n) in enumerate(zip(prompts, output_lens, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=n)
            num_finished = 0
            while num_finished < len(prompts):
                result = self._next_result(manager, 1.0)
                if result is not None and result.is_finished():
                    outputs[int(result.request_id)] = result.generated_tokens
                    num_finished += 1
        return outputs

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        self._num_seen[index] = 0
        self._manager.add_request(
            prompt, request_id=str(index), max_new_tokens=output_len, streaming=True
        )

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        result = self._next_result(self._manager, seconds)
        if result is None:
            return []
        index, tokens = int(result.request_id), list(result.generated_tokens)
        new_tokens, self._num_seen[index] = tokens[self._num_seen[index] :], len(tokens)
        return [(index, new_tokens)]

    def close(self) -> None:
        self._online.close()

    def facts(self) -> dict[str, Any]:
        attention = self.model.config._attn_implementation
        blocks = f"{self.num_blocks} of {_BLOCK} tokens"
        return {"KV blocks": blocks, "tokens a step": self.batch_tokens, "attention": attention}

    def _session(self) -> Any:
        config = transformers.ContinuousBatchingConfig(
            num_blocks=self.num_blocks,
            max_batch_tokens=self.batch_tokens,
            max_requests_per_batch=self.spec.max_num_seqs,
        )
        return self.model.continuous_batching_context_manager(
            self.generation_config, continuous_batching_config=config, persistent_manager=True
        )

    def _next_result(self, manager: "ContinuousBatchingManager", seconds: float) -> Any:
        result = manager.get_result(timeout=max(1e-4, seconds))
        if result is None and not manager.is_running():
            raise RuntimeError("the generation thread has ended")
        if result is not None and result.error is not None:
            raise RuntimeError(f"request {result.request_id}: {result.error}")
        return result
