"""A script that is right, for type checkers: see tests/front/test_types.py."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import torch

from nanoserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)


def main() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, logprobs=2)
    with LLM("tiny-qwen3", dtype=torch.float32, max_num_seqs=8, swap_space=4) as llm:
        outputs: list[RequestOutput] = llm.generate(["a", "b"], params)
        for output in outputs:
            logprobs = output.outputs[0].logprobs
            if logprobs is not None:
                print(logprobs[0])
        llm.generate([[1, 2], [3]], [params, params])
        llm.generate("text", params)
        llm.generate([1, 2, 3])
        llm.generate({"prompt_token_ids": [1, 2]})
        llm.generate([{"prompt": "x"}, {"prompt": "y", "cache_salt": "z"}])
        llm.generate(TokensPrompt(prompt_token_ids=[1]))
        llm.generate([TextPrompt(prompt="a"), TextPrompt(prompt="b")])
        messages = [{"role": "user", "content": "hello"}]
        answer = llm.chat(messages, params, chat_template_kwargs={"enable_thinking": False})
        llm.chat([messages, messages])
        parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        llm.chat(parts, params)
        for delta in llm.stream(messages, params):
            print(delta.outputs[0].text)
        for delta in llm.stream("x"):
            print(delta.outputs[0].text)
        ids: list[int] = llm.get_tokenizer().encode("a")
        beams = llm.beam_search([{"prompt": "a"}], BeamSearchParams(beam_width=2, max_tokens=4))
        print(beams[0].sequences[0].text, answer[0].prompt, ids)
        llm.sleep(level=1)
        llm.wake_up()
        copy = params.clone()
        copy.max_tokens = 5
    args = EngineArgs(model="tiny-qwen3", enforce_eager=True, max_model_len=128)
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("0", "text", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.finished)
    engine.close()
    LLM(**asdict(args)).close()


async def serve() -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny-qwen3"))
    async for output in llm.generate("x", SamplingParams(), request_id="1"):
        print(output.outputs[0].text)
    llm.shutdown()


if __name__ == "__main__":
    main()
    asyncio.run(serve())
