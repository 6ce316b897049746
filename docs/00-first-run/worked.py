"""What chapter 0 says of the first run: it is run, and what comes out is shown."""

from functools import cache
from pathlib import Path

from reference_tables import option_rows

from nanoserve import LLM, RequestOutput, SamplingParams

# The options that chapters speak of; the page of the API has all.
_OPTIONS = (
    *("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "max_model_len"),
    *("block_size", "num_kv_blocks", "gpu_memory_utilization", "enable_prefix_caching"),
    *("scheduling_policy", "async_scheduling", "enforce_eager", "tensor_parallel_size", "dtype"),
)


@cache
def output() -> RequestOutput:
    """What the ten lines of the page get back."""
    question = [{"role": "user", "content": "What is a block table?"}]
    with LLM("tiny-qwen3") as llm:
        return llm.chat(question, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)[0]


def answer() -> str:
    """What they print, as a quotation."""
    completion = output().outputs[0]
    return f"> {completion.text}\n>\n> {completion.finish_reason}"


def num_prompt_tokens() -> int:
    """Tokens of the question within the chat template."""
    return len(output().prompt_token_ids)


def num_output_tokens() -> int:
    """Tokens of the answer, without the one that ended it."""
    return len(output().outputs[0].token_ids)


def num_steps() -> int:
    """Steps of the run: one for the prompt and one for each token, the last of which is EOS."""
    return 1 + num_output_tokens()


def megabytes(name: str) -> str:
    """Of a folder of the package, as files."""
    folder = Path(__file__).parents[2] / "nanoserve" / name
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.0f}"


def options_table() -> str:
    """The options that chapters speak of."""
    rows = option_rows()
    lines = ["| option | default | what it does |", "|---|---|---|"]
    lines += [f"| `{name}` | {rows[name][0]} | {rows[name][1]} |" for name in _OPTIONS]
    return "\n".join(lines)
