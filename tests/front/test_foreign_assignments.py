"""No attribute of one object is assigned by another, but for records that a module fills in."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
from foreign_assignments import foreign_assignments

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent

# Patterns of "file: target", by the reason why they are allowed.
ALLOWED = {
    # Objects whose state is their owner's to write: data without methods of their own for it.
    "a sequence is the record of a request's progress, which the engine's parts write": (
        "engine/*.py: seq.*",
        "engine/input_processor.py: sequences[[]0].siblings",
    ),
    "a leap writes what the engine's steps would have written": (
        "cli/simulate/leap.py: seq.*",
        "cli/simulate/leap.py: metrics.*",
    ),
    "a request and its completions are records of what has been sent of them": (
        "engine/*.py: request.error",
        "engine/*.py: request.pooled",
        "engine/*.py: request.sequences[[]0].metrics.*",
        "engine/*.py: completion.*",
        "engine/*.py: metrics.*",
    ),
    "the error of a step names the requests of that step": ("engine/*.py: error.request_ids",),
    "the input processor fills in its own copy of the parameters": (
        "engine/input_processor.py: params.*",
    ),
    "a plan is filled in while it is made; a step, its times and the counters while it runs": (
        "engine/scheduler.py: plan.*",
        "engine/draft_room.py: plan.budget",
        "engine/llm_engine.py: step.*",
        "engine/stopwatch.py: times.*",
        "engine/*.py: self._stats.*",
        "features/kv_transfer/*.py: self.stats.*",
    ),
    "an extension fills in the inputs of a step": (
        "features/kv_transfer/*.py: inputs.kv_transfers",
        "features/prompt_embeds.py: inputs.embeds",
        "features/lora/extension.py: inputs.adapters",
    ),
    "a batch is numbered, and the handle of a step filled in, by the runner that made them": (
        "worker/model_runner.py: batch.step",
        "cli/simulate/executor.py: batch.step",
        "worker/*.py: handle.*",
        "features/parallel/pipeline.py: launched.sample_inputs",
    ),
    "a request that is not queued yet belongs to whoever has made or received it": (
        "serve/replicas/router_client.py: params.seed",
        "serve/replicas/replica.py: request.sequences[[]0].metrics.arrival_time",
        "serve/http/app.py: one.sequences[[]0].metrics.arrival_time",
        "serve/http/app.py: one.trace_headers",
        "serve/http/chat_completions.py: params.skip_special_tokens",
        "serve/token_stream.py: request.params.output_kind",
    ),
    "a process without the engine keeps the sequences of its requests up to date": (
        "serve/token_stream.py: seq.*",
        "serve/token_stream.py: completion.*",
        "serve/token_stream.py: output.*",
    ),
    "the body of an HTTP request gets the grammar that its tools lead to": (
        "serve/http/chat_completions.py: body.constraint",
    ),
    "it also gets the values of the fields that it does not set": (
        "serve/http/app.py: body.request_id",
        "serve/http/server_defaults.py: body.*",
    ),
    "orders, members and their loads are records of the router": (
        "serve/replicas/router_client.py: order.*",
        "serve/replicas/routing.py: order.*",
        "serve/replicas/routing.py: member.*",
        "serve/replicas/routing.py: self.members[[]name].*",
        "serve/replicas/load.py: *.num_*",
    ),
    "records of a measurement or a search, within one module": (
        "cli/bench/serve/*.py: answer.*",
        "cli/bench/serve/*.py: exchange.*",
        "cli/bench/engines/llama_cpp_engine.py: sequence.num_computed",
        "features/speculative/extension.py: c*.count",
        "features/speculative/extension.py: c.draft_tokens",
        "features/speculative/goodput.py: record.uncomputed",
        "features/speculative/suffix.py: self._newer.token_ids",
    ),
    # Modules of torch and objects of other packages, which are made to be filled in.
    "a linear method makes the weights of its layer": (
        "models/quantization/*_method.py: layer.*",
        "models/layers/linear.py: layer.weight",
    ),
    "a tensor has its codes with it, from the kernel that computes both to the linear": (
        "kernels/triton/quantized_rows.py: result.row_codes",
    ),
    "other packages' objects": (
        "serve/batch/ray_runner.py: DataContext.get_current().enable_progress_bars",
        "cli/bench/engines/hugging_face.py: *generation_config*",
        "cli/bench/engines/llama_cpp_engine.py: *batch.n_tokens",
        "cli/parser.py: namespace.*",
        "checkpoint/gguf/tokenizer.py: backend.*",
        "serve/replicas/request_router.py: pending_request.routing_context.should_backoff",
        "serve/async_llm.py: self._end.atexit",
        "text/tokenizer.py: backend.*",
        "text/tokenizer.py: self._hf.chat_template",
        "worker/compile_ahead.py: module.*",
        "features/parallel/process_group.py: *Op",
        "features/parallel/ray_workers.py: self._processes*.pid",
    ),
    "a class that is decorated": ("sampling_params.py: cls.__init__",),
}
# Patterns that are for files which are being rewritten need not match anything.
MAY_BE_UNUSED = ("engine/*", "sampling_params.py*", "serve/http/chat_completions*")

EXAMPLE = """
class A:
    def __init__(self, other, b):
        self.x = 1
        other.y = 2
        del other.y
        self.part.z += 3
        new = B()
        new.x, b.x = 4, 5
        one, two = B(), other
        one.x = two.x = 6
        setattr(other, "w", 7)
        vars(other).update(v=8)
        for other.i in range(3): pass
        again = B()
        again = other
        again.x = 9
        def inner(new):
            new.x = 10
            self.x = 11
"""


@pytest.fixture(scope="module")
def places() -> dict[str, str]:
    """Where each is, by "file: target"."""
    return {
        f"{one.file}: {one.target}": f"{one.file}:{one.line} {one.function}: {one.target}"
        for one in foreign_assignments(PACKAGE)
    }


def test_assignments_to_other_objects_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(EXAMPLE)
    found = [one.target for one in foreign_assignments(tmp_path)]
    assert sorted(found) == [
        *("again.x", "b.x", "new.x", "other....", "other.i", "other.w", "other.y", "other.y"),
        *("self.part.z", "two.x"),
    ]


def test_no_attribute_is_assigned_by_another_object(places: dict[str, str]) -> None:
    patterns = [pattern for group in ALLOWED.values() for pattern in group]
    wrong = [
        place
        for target, place in places.items()
        if not any(fnmatch(target, pattern) for pattern in patterns)
    ]
    assert not wrong, "\n".join(["give it a method, or an argument of its constructor:", *wrong])


def test_what_is_allowed_is_there(places: dict[str, str]) -> None:
    for pattern in [pattern for group in ALLOWED.values() for pattern in group]:
        is_free = any(fnmatch(pattern, free) for free in MAY_BE_UNUSED)
        assert is_free or any(fnmatch(target, pattern) for target in places), pattern
