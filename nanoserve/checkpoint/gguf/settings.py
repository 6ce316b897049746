"""What a GGUF file says of its model: which architecture, and the settings of that."""

from typing import Any

from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.gguf.names import FORMS, Form
from nanoserve.utils.checks import check_int, check_number, require, shown

# They say how the file was made, or repeat what its tensors say.
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}


def form_of(file: GGUFFile) -> Form:
    """Raises `ValueError` for an architecture that is not read, and says which are."""
    name = file.settings.get("general.architecture")
    form = FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise ValueError(
            f"{file.path}: general.architecture={shown(name)} is not read from GGUF, only "
            f"{', '.join(FORMS)}; if nanoserve has the model (see README.md), give its checkpoint "
            f"in safetensors"
        )
    is_mixture = file.settings.get("llama.expert_count", 0)
    return form._replace(architecture="MixtralForCausalLM") if is_mixture else form


def list_of(file: GGUFFile, name: str, kind: type = object) -> list[Any]:
    """A setting that is a list, of none if it is not there."""
    value = file.settings.get(name, [])
    is_list = isinstance(value, list) and all(isinstance(item, kind) for item in value)
    require(is_list, f"{file.path}: {name}={shown(value)} must be a list of {kind.__name__}")
    return value


class Settings:
    """Those of the model, "llama.block_count" as "block_count". What was read is taken out."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.name = file, file.settings.get("general.architecture")
        prefix = f"{self.name}."
        self.left = {
            name.removeprefix(prefix): value
            for name, value in file.settings.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in _WITHOUT_EFFECT
        }

    def take(self, name: str, default: Any = None) -> Any:
        """A value; of a list with one per layer, the one that they all are."""
        value = self.left.pop(name, default)
        if not isinstance(value, list):
            return value
        is_one = len(set(value)) == 1
        require(is_one, f"{self.told(name, value)} is not implemented: one for all layers is")
        return value[0]

    def size(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        require(value is not None, f"{self.file.path} has no {self.name}.{name}")
        return check_int(f"{self.file.path}: {self.name}.{name}", value, 1, 2**31 - 1)

    def positive(self, name: str) -> float:
        told = f"{self.file.path}: {self.name}.{name}"
        return float(check_number(told, self.take(name), 0, excludes_low=True))

    def told(self, name: str, value: Any) -> str:
        return f"{self.file.path}: {self.name}.{name}={shown(value)}"
