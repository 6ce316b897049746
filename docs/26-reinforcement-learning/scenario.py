"""The recorded run of the chapter on reinforcement learning: requests around a weight update."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def other_weights(out: Path) -> None:
    """A question before and after an update; a short prompt goes on, and is then continued."""
    options = {"block_size": 8, "num_kv_blocks": 32, "max_num_seqs": 4, "max_model_len": 96}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        engine = llm.engine
        message = {"role": "user", "content": "What is a KV cache?"}
        question = engine.tokenizer.apply_chat_template([message])
        outputs = {}

        def run(name: str, prompt: str | list[int], max_tokens: int, num_steps: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(name, prompt, params)
            for _ in range(num_steps):
                outputs.update({output.request_id: output for output in engine.step()})

        run("kept", "The KV cache", 16, 1)
        run("before", question, 3, 3)
        # The same tensors again, so that the tokens are the same; the engine does not compare them.
        llm.update_weights(engine.executor.path, mode="keep", version="step 1")
        run("after", question, 3, 12)
        kept = outputs["kept"]
        text = kept.prompt_token_ids + kept.outputs[0].token_ids
        run("later", text, 3, 3)
        run("later again", text, 3, 3)
