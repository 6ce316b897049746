"""Run vLLM, offline through its `LLM` and online through its engine, request by request.

Its build for CPUs is a separate package for a separate environment; see `nanoserve bench --python`.
Options of this engine are passed to `vllm.LLM`, except quantization=int8. vLLM does not quantize
unquantized weights to int8, so a checkpoint with int8 weights is written from them. The LM head
stays in the data type, because vLLM does not support an int8 LM head.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from . import Engine, Tokens, total_lens
from .int8_checkpoint import write_int8

_WARM_UP = 16  # minimum length of a sequence in tokens


class VllmEngine(Engine):
    is_online = True

    @staticmethod
    def prepare(spec: Namespace) -> None:
        """Write the int8 checkpoint. Raises `ValueError` for a model that cannot be converted."""
        folder = _model(spec)
        if folder != Path(spec.model) and not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            write_int8(Path(spec.model), unfinished)
            unfinished.rename(folder)  # so that it is never partial

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        _set_environment(spec)
        import torch
        import vllm

        chosen = {
            "max_model_len": spec.max_model_len or max(_WARM_UP, *total_lens(spec)),
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "max_num_seqs": spec.max_num_seqs,
            "enforce_eager": spec.enforce_eager,
            "enable_prefix_caching": spec.enable_prefix_caching,
        }
        self.options = {name: value for name, value in chosen.items() if value is not None}
        self.options |= options
        model, chosen = _model(spec), dict(self.options)
        if model != Path(spec.model):
            del chosen["quantization"]  # it is in the checkpoint's config.json
        self.llm = vllm.LLM(
            str(model), dtype=spec.dtype, skip_tokenizer_init=True, seed=0, **chosen
        )
        self.params_class = vllm.SamplingParams
        self.delta = vllm.sampling_params.RequestOutputKind.DELTA
        self.temperature = spec.temperature
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [self._params(n) for n in output_lens]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        params = self._params(output_len, output_kind=self.delta)
        self.llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        outputs = self.llm.llm_engine.step()
        return [(int(output.request_id), list(output.outputs[0].token_ids)) for output in outputs]

    def facts(self) -> dict[str, Any]:
        cache = self.llm.llm_engine.vllm_config.cache_config
        blocks = f"{cache.num_gpu_blocks} of {cache.block_size} tokens"
        return {"KV blocks": blocks, **self.options}

    def _params(self, output_len: int, **more: Any) -> Any:
        return self.params_class(
            max_tokens=output_len,
            temperature=self.temperature,
            ignore_eos=True,
            detokenize=False,
            **more,
        )


def _model(spec: Namespace) -> Path:
    is_int8 = spec.options.get("quantization") == "int8"
    return Path(spec.scratch) / "int8" if is_int8 else Path(spec.model)


def _set_environment(spec: Namespace) -> None:
    """Set environment variables that vLLM reads on import, unless they are set already."""
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if spec.device == "cpu":
        settings["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB; nanoserve's default
        settings["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{spec.threads - 1}"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
