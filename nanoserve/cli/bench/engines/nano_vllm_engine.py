"""Run nano-vllm (github.com/GeeeekExplorer/nano-vllm), which needs an NVIDIA GPU and flash-attn.

It has no greedy decoding, so set a temperature above zero. A step returns a sequence only at its
end, so latencies cannot be measured. Options of this engine are passed to `nanovllm.LLM`.

Written for its public interface, and not run yet.
"""

from argparse import Namespace
from importlib.metadata import version
from typing import Any

from . import Engine, Tokens, total_lens


class NanoVllmEngine(Engine):
    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        import nanovllm
        import torch

        if not spec.temperature:
            raise ValueError("nano-vllm has no greedy decoding; set a --temperature above 0")
        if spec.device != "cuda":
            raise ValueError(f"nano-vllm runs on an NVIDIA GPU, not on {spec.device}")
        # It rejects a token budget that is smaller than its longest sequence.
        longest = spec.max_model_len or max(16, *total_lens(spec))
        chosen = {
            "max_model_len": longest,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "max_num_seqs": spec.max_num_seqs,
            "enforce_eager": spec.enforce_eager,
        }
        self.options = {name: value for name, value in chosen.items() if value is not None}
        self.options |= options
        self.llm = nanovllm.LLM(spec.model, **self.options)
        self.params_class = nanovllm.SamplingParams
        self.temperature = spec.temperature
        self.versions = {"nano-vllm": version("nano-vllm"), "torch": torch.__version__}

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        params = [
            self.params_class(temperature=self.temperature, max_tokens=n, ignore_eos=True)
            for n in output_lens
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output["token_ids"] for output in outputs]

    def facts(self) -> dict[str, Any]:
        return self.options
