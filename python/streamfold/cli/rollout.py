"""``streamfold rollout``: generates n samples for each prompt of a file on an engine, and resumes if it is rerun."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from streamfold.cli.completing import complete_all
from streamfold.cli.console import cancel_on_signals, console, errors, fail, progress_bar
from streamfold.cli.journal import Journal, Plan
from streamfold.cli.options import (
    EXPERTS_HELP,
    experts_option,
    extra_option,
    headers_option,
    params_option,
    tokenizer_option,
)
from streamfold.client.client import Client
from streamfold.client.limits import Limits, Retries
from streamfold.engines.detect import ENGINES
from streamfold.errors import EngineError
from streamfold.samples.metadata import count_of
from streamfold.samples.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rich.progress import Progress, TaskID

    from streamfold._core import Experts
    from streamfold.samples.sample import Sample

__all__ = ["command"]

_DEFAULT_MAX_NEW_TOKENS = 1024
_REDRAW_SECONDS = 0.2
_SHOWN_FAILURES = 10


def command(
    url: Annotated[str, typer.Option(help="URL of the engine or router, such as http://10.0.0.1:30000.")],
    prompts: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='File of prompts, one JSON object per line, with "prompt" (text, or a list of chat messages), '
            '"input_ids", or both: then the ids are sent. "image_data": images, for SGLang.',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            help="File for the samples, finished and partial ones, one JSON object per line. Finished samples in it "
            "are not generated again.",
        ),
    ],
    engine: Annotated[
        Literal["sglang", "vllm", "vllm-completions", "auto"],
        typer.Option(
            help="Endpoint: sglang: /generate; vllm: /inference/v1/generate; vllm-completions: /v1/completions; "
            "auto: ask the server which engine it is."
        ),
    ] = "sglang",
    n_samples_per_prompt: Annotated[
        int, typer.Option("--n-samples-per-prompt", "-n", min=1, help="Samples per prompt.")
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Samples in flight at the same time.")] = 64,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Tokens per response at most. Default: as in --sampling-params, or {_DEFAULT_MAX_NEW_TOKENS}."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0: greedy. Default: the engine's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Probability mass to sample from. Default: the engine's.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample only from the K most likely tokens; -1: from all. Default: the engine's.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="String that ends a response. May be repeated. Default: none.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Sample i of the whole run is sampled with seed SEED + i. Default: the engine chooses."),
    ] = None,
    sampling_params: Annotated[
        str | None,
        typer.Option(
            help="JSON object of sampling parameters under the engine's names. The options above override it."
        ),
    ] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            help="JSON object of further keys of each request: a LoRA adapter (SGLang lora_path, vLLM model), "
            "priority, cache_salt. Default: none."
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Header of each request, as NAME=VALUE. May be repeated. Default: none."),
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs/--no-logprobs", help="Request log-probabilities.")] = True,
    experts: Annotated[
        str | None,
        typer.Option(
            help=f"Request routed experts. {EXPERTS_HELP} Needs prompt token ids: input_ids or --tokenizer. "
            "Default: not requested."
        ),
    ] = None,
    arrays: Annotated[
        Literal["lists", "npz"],
        typer.Option(help="Where per-token data goes: lists in the line, or an .npz file per sample in OUT.arrays/."),
    ] = "lists",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Name or folder of a transformers tokenizer. It encodes prompts without input_ids, texts and chat "
            "messages. Default: the engine encodes them."
        ),
    ] = None,
    prompt_token_ids: Annotated[
        bool,
        typer.Option(
            "--prompt-token-ids",
            help="Request the ids of text prompts, so that partial samples are resumed instead of restarted. "
            "Costs bandwidth: SGLang repeats them in each event. Not needed with --tokenizer.",
        ),
    ] = False,
    eos_token_id: Annotated[
        list[int] | None,
        typer.Option(
            help="EOS token id, in addition to the EOS of --tokenizer. A response that ends with it is "
            "finished, even if its request was aborted there. May be repeated. Default: none."
        ),
    ] = None,
    tries: Annotated[
        int, typer.Option(min=1, help="Requests per sample at most: the first one, retries and resumes.")
    ] = 6,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token to send. Default: none.", envvar="STREAMFOLD_API_KEY")
    ] = None,
) -> None:
    """Generate n samples for each prompt of a file, and write each one when it is finished, as a line of JSON.

    Rerun the same command to resume after an interruption. Finished samples are
    kept. Partial ones are resumed from their tokens, or restarted if the token
    ids of their prompt are unknown. Ctrl-C, SIGTERM and SIGHUP save what was received.

    Exits with 0 if all samples are finished, with 130 after one of these signals,
    otherwise with 1.
    """
    overrides = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or None,
    }
    try:
        decoder, encode, stop_ids = tokenizer_option(tokenizer)
        params = _sampling_params(params_option(sampling_params), overrides)
        plan = Plan(prompts, params, n=n_samples_per_prompt, seed=seed, encode=encode)
        shape = experts_option(experts)
        _check_prompts(plan, engine, shape)
        client = Client(
            url,
            engine=engine,
            api_key=api_key,
            extra=extra_option(extra, engine),
            headers=headers_option(header or ()),
            tokenizer=decoder,
            limits=Limits(calls=concurrency),
            retries=Retries(tries=tries),
            experts=shape,
        )
        with Journal(out, plan, arrays) as journal:
            work = _Work(plan, journal)

            def start() -> Coroutine[Any, Any, None]:
                _check_prompts(plan, client.engine, shape)  # which is known now, also with auto
                ids = [*stop_ids, *(eos_token_id or ())]
                return complete_all(
                    client,
                    work,
                    work.end,
                    concurrency=concurrency,
                    stop_ids=ids,
                    logprobs=logprobs,
                    prompt_token_ids=prompt_token_ids,
                )

            interrupted = asyncio.run(_run(client, work, start))
    except (OSError, ValueError, EngineError) as error:  # EngineError: with auto, the engine could not be found out
        fail(str(error))
    _report(work, out, interrupted=interrupted)


def _sampling_params(params: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    default = {} if "max_tokens" in params else {"max_new_tokens": _DEFAULT_MAX_NEW_TOKENS}
    return {**default, **params, **{name: value for name, value in overrides.items() if value is not None}}


def _check_prompts(plan: Plan, engine: str, experts: Experts | None) -> None:
    """Refuse prompts without ids where ids are needed, and images where they cannot be sent.

    Raises:
        ValueError: there are such prompts.
    """
    if experts is not None and plan.texts:
        raise ValueError(f"--experts: {plan.texts} prompts have no input_ids: add ids, or use --tokenizer")
    if plan.images and engine in ENGINES and ENGINES[engine].image_key is None:
        raise ValueError(f"{plan.images} prompts have image_data, which --engine {engine} does not take: use SGLang")
    if engine == "vllm" and plan.texts:
        raise ValueError(
            f"vLLM's token endpoint only takes ids, but {plan.texts} prompts have none: use --tokenizer, or "
            "--engine vllm-completions"
        )


class _Work:
    """The samples of a plan that are not finished yet, and counts of what became of them."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self.plan = plan
        self.journal = journal
        self.failures: Counter[str] = Counter()
        self.tokens = 0
        self.restarted_tokens = 0
        self._before: dict[int | None, tuple[int, int]] = {}  # tokens, and restarted tokens, of a sample at its start

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self.plan)):
            if index not in self.journal.finished:
                sample = self.journal.partial.get(index) or self.plan[index]
                self._before[index] = sample.response_length, count_of(sample, "restarted_tokens")
                yield sample

    def end(self, sample: Sample, error: Exception | None) -> None:
        """Count a sample and write it to the journal."""
        tokens, restarted = self._before.pop(sample.index)
        self.tokens += max(0, sample.response_length - tokens)
        self.restarted_tokens += count_of(sample, "restarted_tokens") - restarted
        if error is not None:
            self.failures[f"{type(error).__name__}: {error}"] += 1
        if sample.response_length or is_finished(sample):
            self.journal.write(sample)

    def draw(self, progress: Progress, bar: TaskID, running_tokens: int) -> None:
        """Update the progress bar; ``running_tokens`` are those of requests in flight."""
        rate = (self.tokens + running_tokens) / (progress.tasks[bar].elapsed or 1.0)
        failed = sum(self.failures.values())
        progress.update(bar, completed=len(self.journal.finished), total=len(self.plan), failed=failed, rate=rate)


async def _run(client: Client, work: _Work, start: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run ``start()`` under a progress bar; returns whether a signal interrupted it."""
    text = "{task.completed} of {task.total}, {task.fields[failed]} failed, {task.fields[rate]:.0f} tokens/s"
    with progress_bar(text, target=errors) as progress:
        bar = progress.add_task("rollout", failed=0, rate=0.0)
        async with client:
            task = cancel_on_signals(start())  # a second signal ends the drains
            while not task.done():
                await asyncio.wait({task}, timeout=_REDRAW_SECONDS)
                work.draw(progress, bar, sum(call.token_count for call in client.running))
    if not task.cancelled():
        task.result()
    return task.cancelled()


def _report(work: _Work, out: Path, *, interrupted: bool) -> None:
    """Print what was done; exits with 130 or 1 if samples are missing."""
    journal, total = work.journal, len(work.plan)
    if work.restarted_tokens:
        errors.print(
            f"{work.restarted_tokens} tokens were dropped and generated again: their prompts have no ids (use "
            "--prompt-token-ids or --tokenizer), or they ended in the middle of a stop string",
            soft_wrap=True,
        )
    console.print(f"{len(journal.finished)} of {total} samples are in {out}", soft_wrap=True)
    for message, count in work.failures.most_common(_SHOWN_FAILURES):
        errors.print(f"{count} failed: {message}", style="red", soft_wrap=True)
    if missing := total - len(journal.finished):
        console.print(
            f"{missing} are missing, {len(journal.partial)} of them partial: rerun the same command to resume"
        )
        raise typer.Exit(130 if interrupted else 1)
