"""A request has a prompt, sequences, and the results collected for each sequence."""

from dataclasses import dataclass, field

import numpy as np

from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import CompletionOutput, Logprob
from nanoserve.pooling_params import PoolingParams
from nanoserve.sampling_params import SamplingParams


@dataclass(eq=False)
class Completion:
    """The results collected for one sequence, in addition to its tokens."""

    seq: Sequence
    latest: CompletionOutput | None = None
    num_sent: int = 0  # tokens already returned in deltas
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    weights_versions: list[tuple[int, int | str]] = field(default_factory=list)
    routed_experts: np.ndarray | None = None  # once the sequence has ended: see `CompletionOutput`

    def begin_weights(self, version: int | str) -> None:
        """Note that the next tokens are made by the weights `version`."""
        start, versions = self.seq.num_output_tokens, self.weights_versions
        if versions and versions[-1][0] == start:
            versions.pop()  # it has made no token
        versions.append((start, version))

    def versions_from(self, first: int) -> list[tuple[int, int | str]]:
        """Return `weights_versions` of the output tokens from `first` on, counted from there."""
        return versions_from(self.weights_versions, first)

    def set_routed_experts(self, expert_ids: np.ndarray) -> None:
        """Set `routed_experts`, [num_tokens, num_layers, top_k], before the last output is made."""
        self.routed_experts = expert_ids

    def revert(self, num_tokens: int) -> None:
        """Restore the state in which the sequence had `num_tokens` tokens and had not ended."""
        seq = self.seq
        if seq.finished:
            seq.status = SequenceStatus.WAITING
        seq.finish_reason = seq.stop_reason = None
        del seq.token_ids[num_tokens:]
        seq.block_hashes.clear()
        self.routed_experts = None
        self.num_sent = min(self.num_sent, seq.num_output_tokens)
        if self.logprobs is not None:
            del self.logprobs[seq.num_output_tokens :]
            chosen = zip(self.logprobs, seq.output_token_ids, strict=True)
            self.cumulative_logprob = sum(entry[token_id].logprob for entry, token_id in chosen)


def versions_from(versions: list[tuple[int, int | str]], first: int) -> list[tuple[int, int | str]]:
    """Return `CompletionOutput.weights_versions` of the tokens from `first` on."""
    known = [version for start, version in versions if start <= first]
    later = [(start - first, version) for start, version in versions if start > first]
    return [*((0, version) for version in known[-1:]), *later]


@dataclass(eq=False)
class Request:
    """The sequences of one prompt, and the results collected for the prompt itself."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    extensions: tuple[str, ...] = ()  # names of extensions that the engine needs for it
    error: Exception | None = None  # the error that ended it: see `RequestOutput.error`
    trace_headers: dict[str, str] | None = None  # of HTTP: see `nanoserve.features.request_spans`
    # A pooling request has parameters and a result of its own, and ends with that result.
    pooling_params: PoolingParams | None = None
    pooled: np.ndarray | None = None  # float32: see `RequestOutput.pooled`
    completions: list[Completion] = field(init=False)

    def __post_init__(self) -> None:
        self.completions = [Completion(seq) for seq in self.sequences]

    def begin_weights(self, version: int | str) -> None:
        """Note that the next tokens are made by the weights `version`."""
        for completion in self.completions:
            completion.begin_weights(version)

    def set_pooled(self, result: np.ndarray) -> None:
        """Set the result of a pooling request, with which it ends."""
        self.pooled = result

    def use_lora(self, lora_request: LoRARequest) -> None:
        """Set the adapter of a request that is not queued yet."""
        for seq in self.sequences:
            seq.lora_request = lora_request
            # Until the adapter is read. A router of replicas distinguishes adapters by it.
            seq.set_key("lora", lora_request.path)

    @property
    def finished(self) -> bool:
        return all(seq.finished for seq in self.sequences)
