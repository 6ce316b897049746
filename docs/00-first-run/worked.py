"""Chapter 0: the example of the page is run here, and the page shows its results."""

from functools import cache
from pathlib import Path

from reference_tables import option_rows

from nanoserve import LLM, RequestOutput, SamplingParams

# Options that the chapters refer to; the reference has all of them.
_OPTIONS = (
    *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "max_model_len"),
    *("block_size", "num_kv_blocks", "gpu_memory_utilization", "enable_prefix_caching"),
    *("scheduling_policy", "async_scheduling", "enforce_eager", "tensor_parallel_size", "dtype"),
)


@cache
def output() -> RequestOutput:
    """Return the result of the page's ten lines."""
    question = [{"role": "user", "content": "What is a block table?"}]
    with LLM("tiny-qwen3") as llm:
        return llm.chat(question, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)[0]


def answer() -> str:
    """Return what they print, as a quotation."""
    completion = output().outputs[0]
    return f"> {completion.text}\n>\n> {completion.finish_reason}"


def num_prompt_tokens() -> int:
    """Return the number of tokens of the question in the chat template."""
    return len(output().prompt_token_ids)


def num_output_tokens() -> int:
    """Return the number of tokens of the answer, without the end-of-sequence token."""
    return len(output().outputs[0].token_ids)


def num_steps() -> int:
    """Return the number of steps: one for the prompt, one for each token of the answer."""
    return 1 + num_output_tokens()


def megabytes(name: str) -> str:
    """Return the size of the files in a folder of the package."""
    folder = Path(__file__).parents[2] / "nanoserve" / name
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.0f}"


def options_table() -> str:
    """Return a table of `_OPTIONS`."""
    rows = option_rows()
    lines = ["| option | default | what it does |", "|---|---|---|"]
    lines += [f"| `{name}` | {rows[name][0]} | {rows[name][1]} |" for name in _OPTIONS]
    return "\n".join(lines)
