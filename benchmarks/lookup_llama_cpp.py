"""Run llama.cpp with and without prompt lookup on scripted texts, for `speculation.py`.

    python benchmarks/speculation.py --llama-cpp PYTHON     PYTHON has llama-cpp-python and gguf

That starts this file with PYTHON, which needs nothing of nanoserve. Draft tokens are those of
`LlamaPromptLookupDecoding` in llama-cpp-python. The library computes all tokens of a step in one
batch, as its own lookup does, and its logits for each are read; but the output is scripted, as with
nanoserve.
"""

import json
import statistics
import sys
from argparse import Namespace
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

sys.path.insert(0, str(Path(__file__).parents[1] / "nanoserve" / "cli" / "bench"))
from engines.llama_cpp_engine import LlamaCppEngine

# A prompt, and the answer that comes out of it.
Script = tuple[list[int], list[int]]


class LookupEngine(LlamaCppEngine):
    """Decode scripts, with up to `num_drafts` draft tokens a step for each sequence; 0 is off."""

    def __init__(self, spec: Namespace) -> None:
        super().__init__(spec, {})
        self.num_drafts = 0
        self.num_drafted = self.num_accepted = 0
        self.scripts: list[Script] = []

    def decode_rate(self, scripts: list[Script]) -> float:
        """Return tokens per second from when all decode until the first one ends."""
        self.scripts = scripts
        for index, (prompt, answer) in enumerate(scripts):
            self.add(index, prompt, len(answer))
        while self.waiting or not all(sequence.output for sequence in self.running):
            super().poll(0)
            for sequence in self.running:  # prompts end here, with a token each
                sequence.output = self.scripts[sequence.index][1][: len(sequence.output)]
        before, began = sum(len(sequence.output) for sequence in self.running), perf_counter()
        while not any(len(s.output) == s.output_len for s in self.running):
            self._step()
        seconds = perf_counter() - began
        num_tokens = sum(len(sequence.output) for sequence in self.running) - before
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        self.free_slots += [sequence.slot for sequence in self.running]
        self.running.clear()
        return num_tokens / seconds

    def close(self) -> None:
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def _step(self) -> None:
        """Compute one batch: the last token of each sequence, and its draft tokens."""
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=self.num_drafts)
        rows: list[tuple[Any, int, list[int]]] = []
        self.batch.n_tokens = 0
        for sequence in self.running:
            tokens = sequence.prompt + sequence.output
            most = sequence.output_len - len(sequence.output) - 1
            drafts = []
            if self.num_drafts:
                drafts = lookup(np.array(tokens, dtype=np.intc))[:most].tolist()
            row = self.batch.n_tokens
            self._append(tokens[-1:] + drafts, len(tokens) - 1, sequence.slot)
            for place in range(row, self.batch.n_tokens):
                self.batch.logits[place] = 1
            rows.append((sequence, row, drafts))
        status = lib.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        memory = lib.llama_get_memory(self.context)
        for sequence, row, drafts in rows:
            for place in range(row, row + 1 + len(drafts)):
                logits = lib.llama_get_logits_ith(self.context, place)
                np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()
            answer, start = self.scripts[sequence.index][1], len(sequence.output)
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == answer[start + accepted]:
                accepted += 1
            sequence.output = answer[: start + accepted + 1]
            # K and V of the last token do not exist yet; remove those of rejected draft tokens.
            first_wrong = len(sequence.prompt) + len(sequence.output) - 1
            if accepted < len(drafts):
                lib.llama_memory_seq_rm(memory, sequence.slot, first_wrong, -1)
            self.num_drafted += len(drafts)
            self.num_accepted += accepted


def main() -> None:
    spec = Namespace(**json.loads(Path(sys.argv[1]).read_text()))
    LookupEngine.prepare(spec)
    for cell in spec.cells:
        spec.prompts, answers = zip(*cell["rounds"][0], strict=True)
        spec.output_lens = [len(answer) for answer in answers]
        spec.max_num_seqs = len(answers)
        engine = LookupEngine(spec)
        for num_drafts in spec.drafts:
            rates: list[list[float]] = [[], []]
            engine.num_drafted = engine.num_accepted = 0
            for number, scripts in enumerate(cell["rounds"]):
                rate = [0.0, 0.0]
                for which in (0, 1) if number % 2 else (1, 0):
                    engine.num_drafts = which * num_drafts
                    rate[which] = engine.decode_rate(scripts)
                if number:  # the first round is for warming up
                    rates[0].append(rate[0])
                    rates[1].append(rate[1])
            ratios = [on / off for off, on in zip(*rates, strict=True)]
            off, on = (statistics.median(values) for values in rates)
            print(
                f"| {cell['text']} | {len(answers)} | {num_drafts} | {off:.0f} | {on:.0f} | "
                f"**{statistics.median(ratios):.2f}** | {min(ratios):.2f} - {max(ratios):.2f} | "
                f"{engine.num_accepted} of {engine.num_drafted} |",
                flush=True,
            )
        engine.close()


if __name__ == "__main__":
    main()
