"""The recorded run of the chapter on output."""

from pathlib import Path

from nanoserve import LLM, SamplingParams
from nanoserve.sampling_params import RequestOutputKind


def text_in_three_ways(out: Path) -> None:
    """One question three times: unlimited, with a stop string, and limited by length."""
    options = {"dtype": "float32", "block_size": 8, "num_kv_blocks": 48, "max_num_seqs": 4}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        message = {"role": "user", "content": "什么是块表？"}
        prompt = llm.engine.tokenizer.apply_chat_template([message])
        settings = {"free": {}, "stop-string": {"stop": "物理块"}, "length": {"max_tokens": 12}}
        for name, chosen in settings.items():
            params = {"temperature": 0, "max_tokens": 80, "output_kind": RequestOutputKind.DELTA}
            llm.engine.add_request(name, prompt, SamplingParams(**{**params, **chosen}))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
