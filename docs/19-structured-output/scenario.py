"""Trace of chapter 19: a constrained answer and an unconstrained one in the same batch.

It needs the extra `guided`, as all structured output does.
"""

from pathlib import Path

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{3,6}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "travel": {"enum": ["by train", "by plane"]},
    },
    "required": ["city", "days", "travel"],
    "additionalProperties": False,
}


def guided_run(out: Path) -> None:
    """The bundled model knows no cities, but its answer is a valid document."""
    schema = StructuredOutputsParams(json=_SCHEMA)
    constrained = SamplingParams(temperature=0, max_tokens=60, structured_outputs=schema)
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), num_kv_blocks=24, max_num_seqs=4
    ) as llm:
        engine = llm.engine
        engine.add_request("guided", "A trip, please.", constrained)
        while not engine.stats.num_steps:  # its grammar is being compiled
            engine.step()
        engine.add_request("free", "What is a block table?", free)
        while engine.has_unfinished_requests():
            engine.step()
