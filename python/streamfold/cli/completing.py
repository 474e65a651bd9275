"""Complete many samples with limited concurrency, for ``streamfold rollout``; each is reported when it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamfold.errors import StreamfoldError
from streamfold.samples.completion import complete
from streamfold.samples.options import CompletionOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from streamfold.client.client import Client
    from streamfold.samples.sample import Sample

__all__ = ["complete_all"]


async def complete_all(
    client: Client,
    samples: Iterable[Sample],
    on_end: Callable[[Sample, StreamfoldError | ValueError | None], object],
    *,
    concurrency: int = 64,
    stop_ids: Iterable[int] = (),
    logprobs: bool = True,
    prompt_token_ids: bool = False,
) -> None:
    """Complete all ``samples``, each with its own ``metadata["sampling_params"]``, ``concurrency`` at a time.

    ``on_end`` is called once for each sample that was started, with the error that ended it, if there was one; what it
    raises ends the run. Cancelling this aborts what is in flight and hands the partial samples to ``on_end`` too. A
    second cancel ends the drains of side data.

    Raises:
        ValueError: ``concurrency`` is below 1.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    options = CompletionOptions(stop_ids=set(stop_ids), logprobs=logprobs, prompt_token_ids=prompt_token_ids)
    rest = iter(samples)

    async def work() -> None:
        for sample in rest:
            error: StreamfoldError | ValueError | None = None
            try:
                await complete(client, sample, sample.metadata["sampling_params"], options=options)
            except (StreamfoldError, ValueError) as failure:
                error = failure
            finally:
                on_end(sample, error)

    await _all_of([asyncio.ensure_future(work()) for _ in range(concurrency)])


async def _all_of(workers: list[asyncio.Task[None]]) -> None:
    """Wait for all workers; the first error, or a cancel of this, cancels the others and is raised at the end."""
    cancelled = None
    while pending := [worker for worker in workers if not worker.done()]:
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            cancelled = error
        for worker in pending:  # none is left, or one has failed, or all are cancelled: calls end within bounds
            worker.cancel()
    for worker in workers:
        if not worker.cancelled():
            worker.result()
    if cancelled is not None:
        raise cancelled
