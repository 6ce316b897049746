"""What a person at the terminal sees of `generate`."""

import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from nanoserve.outputs import RequestOutput


def with_progress(outputs: Iterable[RequestOutput], num_requests: int) -> Iterator[RequestOutput]:
    """The same outputs, and a bar of requests done with tokens per second in and out."""
    start, num_in, num_out = time.perf_counter(), 0, 0
    with tqdm(total=num_requests, desc="Requests", dynamic_ncols=True) as bar:
        for output in outputs:
            num_in += len(output.prompt_token_ids)
            num_out += sum(len(completion.token_ids) for completion in output.outputs)
            seconds = time.perf_counter() - start
            bar.set_postfix_str(
                f"in {num_in / seconds:.0f} tok/s, out {num_out / seconds:.0f} tok/s",
                refresh=False,
            )
            bar.update()
            yield output
