"""Which ways of sharing a model go together; asked of a configuration that wants several."""

from typing import Any

from nanoserve.checks import require


def check_parallel(config: Any) -> None:
    """Of an `EngineConfig`.

    Raises `ValueError` for what a pipeline, or Ray, cannot be combined with.
    """
    stages, asked = config.pipeline_parallel_size, config.speculative_config
    num_ranks = config.tensor_parallel_size * stages
    require(
        config.distributed_executor_backend != "ray" or num_ranks > 1,
        "distributed_executor_backend='ray' places the ranks of tensor_parallel_size x "
        f"pipeline_parallel_size, of which there is {num_ranks}",
    )
    if stages == 1:
        return
    told = f"pipeline_parallel_size={stages}"
    require(
        not config.async_scheduling,
        f"{told} has {stages} steps under way already: leave out async_scheduling=True",
    )
    require(
        not config.capture_sampling, f"{told} samples behind its last stage: no capture_sampling"
    )
    require(
        asked is None or asked.method != "hidden_head",
        f"{told} has no rank with the whole embedding, which method='hidden_head' needs: take "
        "'ngram', 'suffix' or 'draft_model'",
    )
