"""Tries all decoder classes of transformers, and writes docs/reference/decoder-classes.md.

    python docs/decoder_classes.py                     # all classes: some minutes
    python docs/decoder_classes.py OlmoForCausalLM GPT2LMHeadModel    # prints these only

Each class is built from a small configuration with random weights, saved, and loaded by nanoserve.
A class runs if greedy tokens, and log-probabilities to 1e-4, are those of transformers' `generate`.
"""

import logging
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.text_part import text_config
from nanoserve.checkpoint.transformers_config import why_not
from nanoserve.checkpoint.unsupported_architectures import kind_of_model
from nanoserve.models.registry import supported_architectures

PAGE = Path(__file__).with_name("reference") / "decoder-classes.md"
SECONDS = 60  # for one class
MOST_PARAMETERS = 20_000_000
# Whatever a class calls its sizes. Only the names that it has are used.
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "sliding_window": 9,
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 48, "rotary_dim": 8,
    "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256, "ffn_dim": 48,
    "word_embed_proj_dim": 64, "num_layers": 3, "num_heads": 4, "hidden_dim": 48,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_experts_per_token": 2, "shared_expert_intermediate_size": 24,
    "moe_num_experts": 4, "moe_k": 2, "expert_intermediate_size": 24, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4,
    "encoder_layers": 1, "encoder_ffn_dim": 48, "encoder_attention_heads": 4, "is_decoder": True,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Of classes that need more.
SETTINGS: dict[str, dict[str, Any]] = {
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Gemma4ForCausalLM": {
        "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {"02": {"head_dim": 32}},
    },
}  # fmt: skip
PROMPTS = (1, 5, 9, 17, 30)  # tokens
NEW_TOKENS = 10


class Found(NamedTuple):
    """What happens to a class: `kind` is a heading of the page."""

    kind: str
    reason: str = ""


OWN, THROUGH, REJECTED, UNTRIED = "own class", "through transformers", "rejected", "not tried"
TITLES = {
    OWN: "Classes of nanoserve's own",
    THROUGH: "Through transformers",
    REJECTED: "Rejected",
    UNTRIED: "Not tried",
}


def decoder_classes() -> dict[str, str]:
    """Return the classes that `AutoModelForCausalLM` knows, with their model types.

    Of a class with several types, the first one in alphabetical order counts, unless its name is
    that of the class.
    """
    types: dict[str, list[str]] = {}
    for kind, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        types.setdefault(name, []).append(kind)
    return {
        name: next((k for k in kinds if name.lower().startswith(k.replace("_", ""))), kinds[0])
        for name, kinds in types.items()
    }


def try_class(name: str) -> Found:
    """Return what nanoserve does with a class of transformers."""
    if name in supported_architectures():
        return Found(OWN)
    try:
        with _time_limit():
            return _try_class(getattr(transformers, name))
    except ImportError as error:
        return Found(UNTRIED, f"transformers needs another package: {_first_line(error)}")


def _try_class(model_class: type[PreTrainedModel]) -> Found:
    name = model_class.__name__
    try:
        settings = small_settings(model_class.config_class, SETTINGS.get(name, {}))
        if text_config({**settings.to_dict(), "architectures": [name]}) is not None:
            return Found(OWN, "of its text part")
        named = {**settings.to_dict(), "architectures": [name]}
        reason = kind_of_model(named) or why_not(name, settings)
        if reason is not None:
            return Found(REJECTED, reason)
        with torch.device("meta"):
            meta = model_class._from_config(settings)
        size = sum(parameter.numel() for parameter in meta.parameters())
        if size > MOST_PARAMETERS:
            return Found(UNTRIED, f"its small configuration has {size} parameters")
        model = random_model(model_class, settings)
        wanted = [generate(model, prompt) for prompt in prompts()]
    except Exception as error:  # transformers' own code, with settings that we guessed
        with suppress(Exception):
            # The default configuration is that of some published model, and too large to build.
            named = {"architectures": [name]}
            reason = kind_of_model(named) or why_not(name, model_class.config_class())
            if reason is not None:
                return Found(REJECTED, reason)
        return Found(UNTRIED, f"no small configuration: {_first_line(error)}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            found = run(folder)
        except ValueError as error:
            return Found(REJECTED, _first_line(error).partition("through transformers: ")[2])
        except Exception as error:  # which would be a defect of nanoserve
            return Found(REJECTED, f"WRONG: {type(error).__name__}: {_first_line(error)}")
    error = difference(found, wanted)
    return Found(THROUGH) if error is None else Found(REJECTED, f"WRONG: {error}")


def small_settings(
    config_class: type[PretrainedConfig], own: Mapping[str, Any]
) -> PretrainedConfig:
    """Return a small configuration of a class, with settings of its `own`."""
    default = config_class().to_dict()
    settings = {name: value for name, value in SIZES.items() if name in default}
    if default.get("sliding_window") is None:
        settings.pop("sliding_window", None)
    layers = SIZES["num_hidden_layers"]
    for name, value in default.items():
        # One entry for each layer: of each kind of layers, the last one too.
        if isinstance(value, list) and len(value) > layers and "layer" in name:
            settings[name] = value[: layers - 1] + value[-1:]
    return config_class(**settings | own)


def random_model(
    model_class: type[PreTrainedModel], settings: PretrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """Return a model whose weights are so large that its logits do not nearly tie."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings._attn_implementation = "eager"
        model = model_class(settings).float().eval()
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                nn.init.uniform_(parameter.data, 0.5, 1.5)
            else:
                nn.init.normal_(parameter.data, std=0.2)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in PROMPTS]


def generate(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their log-probabilities."""
    ids = torch.tensor([prompt])
    output: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=-1,
    )
    token_ids = output.sequences[0, len(prompt) :].tolist()
    logprobs = [
        logits[0].log_softmax(-1)[token].item()
        for logits, token in zip(output.logits, token_ids, strict=True)
    ]
    return token_ids, logprobs


def run(folder: str) -> list[tuple[list[int], list[float]]]:
    """Return nanoserve's greedy tokens and log-probabilities, from a small pool, in chunks."""
    with LLM(
        folder,
        skip_tokenizer_init=True,
        block_size=4,
        num_kv_blocks=24,  # less than the requests take: some are preempted
        max_num_seqs=4,
        max_num_batched_tokens=11,
        max_model_len=64,
    ) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, top_k=-1
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts()]
        outputs = llm.generate(requests, params, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [next(iter(one.values())).logprob for one in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def difference(found: list[Any], wanted: list[Any]) -> str | None:
    """Return how two lists of tokens and log-probabilities differ; None if they do not."""
    if [ids for ids, _ in found] != [ids for ids, _ in wanted]:
        return "other tokens"
    error = max(
        abs(one - other)
        for (_, ours), (_, theirs) in zip(found, wanted, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    return None if error <= 1e-4 else f"log-probabilities differ by {error:.1e}"


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"{SECONDS} s have passed")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _first_line(error: BaseException) -> str:
    line = f"{error}".strip().partition("\n")[0] or type(error).__name__
    return re.sub(r"\s+", " ", line)[:200]


def page(found: dict[str, Found]) -> str:
    """Return the text of the page."""
    kinds = decoder_classes()
    by_kind = {
        kind: {name: one for name, one in found.items() if one.kind == kind}
        for kind in (OWN, THROUGH, REJECTED, UNTRIED)
    }
    num_run = len(by_kind[OWN]) + len(by_kind[THROUGH])
    lines = [
        "# Decoder classes of transformers",
        "",
        "<!-- Written by docs/decoder_classes.py -->",
        "",
        f"All {len(found)} classes that `AutoModelForCausalLM` of transformers "
        f"{transformers.__version__} knows, each with a small random checkpoint: "
        f"**{num_run} run**, {len(by_kind[OWN])} as classes of nanoserve's own and "
        f"{len(by_kind[THROUGH])} "
        "[through transformers](models.md#any-decoder-through-transformers), "
        f"with the tokens and log-probabilities of transformers' `generate`. "
        f"{len(by_kind[REJECTED])} are rejected when they are loaded, and {len(by_kind[UNTRIED])} "
        "were not tried: no small configuration was found for them.",
    ]
    for kind, classes in by_kind.items():
        lines += ["", f"## {TITLES[kind]}", "", "| class | model type | |", "|---|---|---|"]
        for name in sorted(classes):
            reason = classes[name].reason.replace("|", "\\|")
            lines.append(f"| `{name}` | `{kinds[name]}` | {reason} |")
    return "\n".join(lines) + "\n"


def classes_of_page(text: str) -> dict[str, list[str]]:
    """Return the classes under each heading of a page."""
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    return {
        kind: re.findall(r"^\| `(\w+)` ", parts.get(title, ""), re.MULTILINE)
        for kind, title in TITLES.items()
    }


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("nanoserve").setLevel(logging.ERROR)
    found = {}
    for name in names or decoder_classes():
        found[name] = try_class(name)
        print(name, *found[name], sep=" | ", flush=True)
    if not names:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
