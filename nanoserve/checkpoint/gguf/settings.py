"""Read a GGUF file's settings: the architecture, and the entries of that architecture."""

from typing import Any

from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.gguf.names import FORMS, Form
from nanoserve.utils.checks import check_int, check_number, require, shown

# These describe how the file was made, or repeat information of its tensors.
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}


def form_of(file: GGUFFile) -> Form:
    """Return the storage form of the file's architecture.

    Raises `ValueError`, with the supported architectures, for any other.
    """
    name = file.settings.get("general.architecture")
    form = FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise ValueError(
            f"{file.path}: general.architecture={shown(name)} is not supported in GGUF, only "
            f"{', '.join(FORMS)}; if nanoserve supports the model (see README.md), use its "
            f"safetensors checkpoint"
        )
    is_mixture = file.settings.get("llama.expert_count", 0)
    return form._replace(architecture="MixtralForCausalLM") if is_mixture else form


def list_of(file: GGUFFile, name: str, kind: type = object) -> list[Any]:
    """Return a setting that is a list, or an empty list if it is absent."""
    value = file.settings.get(name, [])
    is_list = isinstance(value, list) and all(isinstance(item, kind) for item in value)
    require(is_list, f"{file.path}: {name}={shown(value)} must be a list of {kind.__name__}")
    return value


class Settings:
    """The model's settings without prefix, e.g. "block_count". Reading a setting removes it."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.name = file, file.settings.get("general.architecture")
        prefix = f"{self.name}."
        self.left = {
            name.removeprefix(prefix): value
            for name, value in file.settings.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in _WITHOUT_EFFECT
        }

    def take(self, name: str, default: Any = None) -> Any:
        """Remove and return a value; a list with one value per layer must have equal values."""
        value = self.left.pop(name, default)
        if not isinstance(value, list):
            return value
        is_one = len(set(value)) == 1
        entry = self.entry(name, value)
        require(is_one, f"{entry} is not supported: the values of all layers must be equal")
        return value[0]

    def size(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        require(value is not None, f"{self.file.path} has no {self.name}.{name}")
        return check_int(f"{self.file.path}: {self.name}.{name}", value, 1, 2**31 - 1)

    def num_layers(self, form: Form) -> tuple[int, int]:
        """Return the number of layers, and of those for multi-token prediction behind them."""
        total = self.size("block_count")
        num_nextn = 0 if form.nextn is None else self.take("nextn_predict_layers", 0)
        name = f"{self.file.path}: {self.name}.nextn_predict_layers"
        return total - check_int(name, num_nextn, 0, total - 1), num_nextn

    def positive(self, name: str) -> float:
        where = f"{self.file.path}: {self.name}.{name}"
        return float(check_number(where, self.take(name), 0, excludes_low=True))

    def entry(self, name: str, value: Any) -> str:
        """Describe a setting for an error message."""
        return f"{self.file.path}: {self.name}.{name}={shown(value)}"
