"""Chat with a model: questions in one batch, then a follow-up in each conversation.

python example.py                                  the tiny model bundled with the package
python example.py --model path/to/Qwen3-0.6B       another checkpoint
python example.py --model Qwen/Qwen3-0.6B          a model on the Hugging Face hub
python example.py --ask "What is a block table?"   one or more questions of your own
"""

import argparse
import sys
import time
from importlib.util import find_spec
from itertools import cycle

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

QUESTIONS = [
    "What is a KV cache?",
    "什么是连续批处理？",
    "Explain chunked prefill.",
    "What is 47 + 85?",
    "块表是什么？",
    "What is preemption?",
    "Define the block manager, please.",
    "Who are you?",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["English", "Chinese"]},
        "is_arithmetic": {"type": "boolean"},
        "subject": {"type": "string", "maxLength": 30},
    },
    "required": ["language", "is_arithmetic", "subject"],
    "additionalProperties": False,
}
FOLLOW_UPS = ["What is prefix caching?", "什么是调度器？", "What is 9 + 16?", "Explain top-p."]


def stream(llm: LLM, question: str, max_tokens: int) -> None:
    """Print an answer while it is generated, a token's text at a time."""
    message = {"role": "user", "content": question}
    print(f"\n> {question}\n  ", end="")
    for output in llm.stream([message], SamplingParams(temperature=0, max_tokens=max_tokens)):
        print(output.outputs[0].text, end="", flush=True)
    print()


def ask(llm: LLM, conversations: list[list[dict[str, str]]], max_tokens: int) -> None:
    """Answer the last message of every conversation in one batch, and append the answers."""
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=max_tokens))
    for conversation, output in zip(conversations, outputs, strict=True):
        answer = output.outputs[0].text.strip()
        cached, total = output.metrics.num_cached_prompt_tokens, len(output.prompt_token_ids)
        from_cache = f"   [{cached} of {total} prompt tokens from the cache]" if cached else ""
        print(f"\n> {conversation[-1]['content']}{from_cache}\n  {answer}")
        conversation.append({"role": "assistant", "content": answer})


def describe(llm: LLM, questions: list[str]) -> None:
    """Print answers as JSON that follows a schema; the bundled model was not trained on JSON."""
    if find_spec("llguidance") is None:
        print("  This needs another package: pip install 'nanoserve[guided]'")
        return
    constraint = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=constraint)
    conversations = [[{"role": "user", "content": question}] for question in questions]
    for question, output in zip(questions, llm.chat(conversations, params), strict=True):
        print(f"\n> {question}\n  {output.outputs[0].text}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a model through nanoserve.")
    model = "Folder, bundled name or name on the hub. Default: %(default)s."
    parser.add_argument("--model", default="tiny-qwen3", help=model)
    questions = "Questions, each in a conversation of its own. Default: eight questions."
    parser.add_argument("--ask", nargs="+", default=QUESTIONS, metavar="QUESTION", help=questions)
    length = "Maximum number of tokens in an answer. Default: %(default)s."
    parser.add_argument("--max-tokens", type=int, default=160, help=length)
    args = parser.parse_args()

    start = time.perf_counter()
    with LLM(args.model) as llm:
        loaded = time.perf_counter()
        print(f"{args.model} loaded in {loaded - start:.1f} s")
        print("\n1. One question, streamed.")
        stream(llm, args.ask[0], args.max_tokens)

        print(f"\n2. {len(args.ask)} questions at once.")
        conversations = [[{"role": "user", "content": question}] for question in args.ask]
        ask(llm, conversations, args.max_tokens)

        print("\n3. A follow-up in each conversation: the history is in the prefix cache.")
        for conversation, follow_up in zip(conversations, cycle(FOLLOW_UPS), strict=False):
            conversation.append({"role": "user", "content": follow_up})
        ask(llm, conversations, args.max_tokens)

        print("\n4. JSON that follows a schema.")
        describe(llm, args.ask[:3])

        stats, seconds = llm.stats, time.perf_counter() - loaded
        print(
            f"\n{stats.num_prompt_tokens} tokens in, {stats.num_output_tokens} out"
            f" in {seconds:.1f} s ({stats.num_output_tokens / seconds:.0f} tok/s out),"
            f" {stats.num_steps} steps,"
            f" {stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens"
            f" ({stats.prefix_cache_hit_rate:.0%}) from the prefix cache,"
            f" {stats.num_preemptions} preemptions"
        )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # an invalid option or model; the message has the reason
        sys.exit(f"example.py: {error}")
