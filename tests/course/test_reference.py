"""The reference names each option, parameter, endpoint, metric, architecture and bound there is."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import facts
import pytest
import reference_tables as reference
import reference_words as words
import yaml
from regions import replace_regions

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig

FOLDER = facts.DOCS / "reference"
NEEDS_SERVE = "pip install 'nanoserve[serve]'"


def rows(page: str) -> list[list[str]]:
    """The cells of all rows of a page's tables."""
    text = replace_regions((FOLDER / page).read_text("utf-8"), lambda region: region.value or "")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines]


def named(page: str, place: int = 0) -> list[str]:
    """What a page's tables have as code in the cell at `place` of each row."""
    return [
        name
        for cells in rows(page)
        if len(cells) > place
        for name in re.findall(r"`([^`]+)`", cells[place])
    ]


def test_each_option_has_one_row_with_type_meaning_and_flag() -> None:
    found = {cells[0].strip("`"): cells for cells in rows("engine-options.md") if len(cells) == 6}
    for field in fields(EngineConfig):
        _, kind, default, meaning, flag, vllm = found[field.name]
        assert kind and default and len(meaning) > 10 and vllm, field.name
        assert f"--{field.name.replace('_', '-')}`" in flag, field.name
    assert named("engine-options.md").count("max_num_seqs") == 1


@pytest.mark.parametrize(
    "name", ["speculative_config", "structured_outputs_config", "kv_events_config"]
)
def test_each_entry_of_an_option_that_is_a_dictionary_is_there(name: str) -> None:
    there = {*named("engine-options.md")}
    assert {field.name for field in fields(reference._config_class(name))} <= there


def test_each_sampling_parameter_is_in_both_tables() -> None:
    found = named("sampling-parameters.md")
    assert all(found.count(field.name) >= 2 for field in fields(SamplingParams))


def test_each_architecture_format_and_backend_is_there() -> None:
    from nanoserve.attention.registry import backend_choices
    from nanoserve.checkpoint.formats.registry import FORMATS, SCHEMES
    from nanoserve.checkpoint.gguf.container import BLOCKS
    from nanoserve.models.registry import supported_architectures

    found = {name.strip('"') for name in named("models.md")}
    assert {*supported_architectures(), *FORMATS.names(), *SCHEMES.names(), *BLOCKS} <= found
    assert {*backend_choices()} - {"auto"} <= found


def test_an_architecture_without_words_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: own for name, own in words.FAMILIES.items() if name != "MixtralForCausalLM"}
    monkeypatch.setattr(words, "FAMILIES", others)  # an entry put back would be the last one
    with pytest.raises(ValueError, match="MixtralForCausalLM"):
        reference.architectures()


def test_each_endpoint_field_and_flag_is_there() -> None:
    pytest.importorskip("fastapi", reason=NEEDS_SERVE)
    found = {*named("server.md")}
    assert {path.replace(":path", "") for path in reference.routes()} <= found
    kinds, _ = reference._fields_of_bodies()
    text = (FOLDER / "server.md").read_text("utf-8")
    assert all(f"`{name}`" in text for name in kinds)
    actions = [*reference.server_actions("server"), *reference.server_actions("replicas")]
    assert {flag for action in actions for flag in action.option_strings} <= found


def test_the_routes_are_those_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason=NEEDS_SERVE)
    from nanoserve.serve.async_llm import AsyncLLM
    from nanoserve.serve.http.app import ApiServer
    from nanoserve.serve.http.settings import ServerSettings

    settings = ServerSettings(
        enable_dev_endpoints=True,
        enable_server_load_tracking=True,
        enable_offline_docs=True,
        lora_root=str(tmp_path),
    )
    paths: set[str] = set()
    for runner in ("generate", "pooling"):
        options = {"device": "cpu", "attention_backend": "torch", "num_kv_blocks": 16}
        options["enable_lora"] = True
        llm = AsyncLLM("tiny-qwen3", runner=runner, **options)
        try:
            served: Any = ApiServer(llm, settings).app.routes
            paths |= {route.path for route in served}
        finally:
            llm.shutdown()
    assert paths == reference.routes().keys()


def test_each_metric_is_there_with_its_type() -> None:
    pytest.importorskip("prometheus_client", reason=NEEDS_SERVE)
    found = {cells[0].strip("`"): cells[1] for cells in rows("metrics.md")}
    for family in reference.metric_families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert found[name] == family.type, name


def test_each_constant_that_sounds_like_a_bound_is_a_limit_or_known_to_be_none() -> None:
    listed = {name.partition("[")[0] for group in words.BOUNDS.values() for name in group}
    no_bounds = words.NO_BOUNDS.split()
    unknown = [
        name
        for name in reference.constants_that_sound_like_bounds()
        if name not in listed and name not in no_bounds and name.rpartition(".")[0] not in no_bounds
    ]
    assert not unknown, "add to BOUNDS or NO_BOUNDS of docs/reference_words.py"
    shown = named("limits.md", 2)
    assert {name for group in words.BOUNDS.values() for name in group} <= {*shown}


def test_a_bound_is_read_from_the_source() -> None:
    assert reference.value_of("nanoserve.utils.list_checks.MOST_STOPS") == 1024
    assert reference.value_of("nanoserve.features.structured.limits.MOST_NAMES") == 5000
    assert (
        reference.value_of("nanoserve.features.structured.params._MOST_CHARACTERS[regex]") == 2**14
    )
    with pytest.raises(ValueError, match="there is no"):
        reference.value_of("nanoserve.utils.list_checks.MOST_SHOES")


def test_each_listed_combination_is_rejected() -> None:
    with pytest.raises(ValueError, match="is not rejected"):
        reference._refusal(EngineConfig, "tiny-qwen3", {"max_num_seqs": 4})


def test_the_index_links_to_each_page() -> None:
    index = (FOLDER / "index.md").read_text("utf-8")
    assert all(f"]({page.name})" in index for page in FOLDER.glob("*.md") if page.stem != "index")


def test_the_links_for_contributors_lead_somewhere() -> None:
    text = (facts.ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (facts.ROOT / link).exists(), link


def test_each_form_of_an_issue_has_a_name_and_fields() -> None:
    forms = sorted((facts.ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["bug", "feature", "question"]
    for form in forms:
        said = yaml.safe_load(form.read_text("utf-8"))
        assert said["name"] and said["description"] and said["body"], form
        assert all(field["type"] == "markdown" or field["id"] for field in said["body"]), form
