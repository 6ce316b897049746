"""The adapter of a request, under vLLM's names."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.utils.checks import check_int, is_text, require, shown


@dataclass(frozen=True)
class LoRARequest:
    """Names the LoRA adapter of a request: a folder as peft's `save_pretrained` writes it.

    lora_name: a name for people and for the server. lora_int_id: vLLM's number of the adapter, 1 or
    more. lora_path: the folder. base_model_name: for `/v1/models`.

    Neither name nor number identifies an adapter here: its content does. Files that have changed
    since they were read are read again. Raises `ValueError` for values of other types.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        require(
            is_text(self.lora_name), f"lora_name={shown(self.lora_name)} must be a non-empty string"
        )
        check_int("lora_int_id", self.lora_int_id, 1)
        path = self.lora_path
        is_path = isinstance(path, str | os.PathLike) and "\0" not in str(path) and str(path)
        require(bool(is_path), f"lora_path={shown(path)} must be the folder of an adapter")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)


# One for all prompts, or one per prompt.
SeveralAdapters = LoRARequest | Sequence[LoRARequest | None] | None
