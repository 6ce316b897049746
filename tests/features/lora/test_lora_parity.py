"""Adapters in a batch against peft: each request equals the model with its adapter merged in."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import ALL, ATTENTION, MLP, greedy, logprobs_of, peft_adapter, request_for
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, LoRARequest, SamplingParams

pytest.importorskip("peft")

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
# Ranks 4 to 64, in many subsets of projections, with all that scales them.
ADAPTERS: list[dict[str, Any]] = [
    {"targets": ALL, "rank": 4},
    {"targets": ATTENTION, "rank": 8, "lora_alpha": 3},
    {"targets": MLP, "rank": 16, "use_rslora": True},
    {"targets": ("q_proj",), "rank": 64, "lora_alpha": 16},
    {"targets": ("v_proj", "o_proj"), "rank": 32},
    {"targets": ("k_proj", "up_proj"), "rank": 12},
    {"targets": ALL, "rank": 8, "layers_to_transform": [1]},
    {
        "targets": ALL,
        "rank": 8,
        "rank_pattern": {"q_proj": 4, "layers.1.mlp.down_proj": 24},
        "alpha_pattern": {"layers.0.self_attn.o_proj": 40, "up_proj": 1},
        "use_rslora": True,
    },
]
Served = tuple[Path, list[LoRARequest | None], list[list[int]], list[list[int]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A base, and by request: its adapter, prompt, tokens, and their log-probabilities."""
    base = tmp_path_factory.mktemp("base")
    models = [make_qwen3(base).eval()]
    requests: list[LoRARequest | None] = [None]
    for index, options in enumerate(ADAPTERS):
        folder = tmp_path_factory.mktemp(f"adapter{index}")
        models.append(peft_adapter(base, folder, index, **options))
        requests.append(request_for(folder, f"adapter{index}", index + 1))
    rng = torch.Generator().manual_seed(0)
    prompts, tokens, logprobs = [], [], []
    for length in (1, 5, 17, 30):
        for model in models:
            prompt = torch.randint(300, (length,), generator=rng).tolist()
            prompts.append(prompt)
            tokens.append(greedy(model, prompt, NUM_TOKENS))
            logprobs.append(logprobs_of(model, prompt, tokens[-1]))
    return base, requests * 4, prompts, tokens, logprobs


def largest_error(served: Served, **options: Any) -> float:
    """Serve all requests in one batch; return the largest difference of a log-probability."""
    base, requests, prompts, tokens, logprobs = served
    sizes = {"max_loras": 8, "max_lora_rank": 64, "num_kv_blocks": 200, "max_num_seqs": 64}
    own = {"dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True, **sizes}
    with LLM(str(base), **own | options) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    completions = [output.outputs[0] for output in outputs]
    assert [list(one.token_ids) for one in completions] == tokens
    found = [
        [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
        for one in completions
    ]
    return float((torch.tensor(found) - torch.stack(logprobs)).abs().max())


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_eight_adapters_and_the_base_in_one_batch(served: Served, backend: str) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    assert largest_error(served, attention_backend=backend) < 2e-5


@pytest.mark.size("full")
@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 16, "max_num_seqs": 16}, {"max_loras": 2, "max_cpu_loras": 3}],
    ids=str,
)
def test_in_chunks_and_with_few_places(served: Served, options: dict[str, Any]) -> None:
    assert largest_error(served, **options) < 2e-5


def test_saved_in_16_bits(tmp_path: Path) -> None:
    """Adapters are stored in other types than the model's."""
    peft, seed = pytest.importorskip("peft"), 3
    make_qwen3(tmp_path / "base")
    model = peft_adapter(tmp_path / "base", tmp_path / "adapter", seed)
    del model
    from safetensors.torch import load_file, save_file

    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file)
    base = _model(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").float()
    merged = merged.merge_and_unload().eval()
    prompt = [5, 6, 7]
    with _engine(tmp_path / "base") as llm:
        (output,) = llm.generate(
            [prompt], PARAMS, use_tqdm=False, lora_request=request_for(tmp_path / "adapter")
        )
    assert list(output.outputs[0].token_ids) == greedy(merged, prompt, NUM_TOKENS)


def _model(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def _engine(base: Path, **options: Any) -> LLM:
    own = {"dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True}
    return LLM(str(base), **own | {"num_kv_blocks": 64} | options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora=True.*DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"targets": ("embed_tokens",)}, "embedding"),
    ({"targets": ("lm_head",)}, "LM head"),
    ({"bias": "all"}, "bias='all'"),
    ({"init_lora_weights": "pissa"}, "pissa.*changes the base"),
    ({"init_lora_weights": "olora"}, "olora.*changes the base"),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_peft_can_do_besides_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_qwen3(tmp_path / "base")
    peft_adapter(tmp_path / "base", tmp_path / "adapter", 0, **options)
    with (
        _engine(tmp_path / "base") as llm,
        pytest.raises(ValueError, match=message),
    ):
        llm.generate(
            [[1, 2]], PARAMS, use_tqdm=False, lora_request=request_for(tmp_path / "adapter")
        )


Merge = Callable[[Path], Any]


@pytest.mark.size("full")
def test_random_subsets_of_projections(tmp_path: Path, by_size: Any) -> None:
    """Subsets of the projections, of layers and of ranks that nobody chose."""
    rng = torch.Generator().manual_seed(7)
    base = tmp_path / "base"
    make_qwen3(base)
    folders, models = [], []
    for index in range(8):
        chosen = [name for name in ALL if torch.rand(1, generator=rng) < 0.5] or ["q_proj"]
        rank = int(torch.randint(4, 65, (1,), generator=rng))
        folders.append(tmp_path / f"a{index}")
        models.append(peft_adapter(base, folders[-1], index, chosen, rank))
    prompts = [[3 + i, 4, 5, 9, 2, 7 + i] for i in range(8)]
    requests = [request_for(folder, folder.name) for folder in folders]
    with _engine(base, max_loras=8, max_lora_rank=64) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [greedy(m, p, NUM_TOKENS) for m, p in zip(models, prompts, strict=True)]
    assert len(set(map(tuple, chain(found)))) == 8
