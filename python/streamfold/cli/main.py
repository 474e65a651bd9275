"""The command line: ``streamfold demo | serve | rollout | record | replay``."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from streamfold._core import DIALECTS, __version__
from streamfold.cli import demo as job
from streamfold.cli.completing import complete_all
from streamfold.cli.console import (
    check_out,
    console,
    errors,
    experts_option,
    fail,
    import_loopback,
    params_option,
    print_generation,
    print_report,
    progress_bar,
    tokenizer_option,
)
from streamfold.cli.journal import Journal, Plan
from streamfold.cli.recording import Recording, surroundings
from streamfold.cli.recording import record as record_stream
from streamfold.client.client import Client
from streamfold.client.limits import Limits, Retries
from streamfold.client.urls import bearer
from streamfold.engines.detect import ENGINES
from streamfold.errors import DecodeError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rich.progress import Progress, TaskID

    from streamfold.samples.sample import Sample

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
_SHOW_SECONDS = 0.2
_SHOWN_FAILURES = 10


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer calls it so
    if wanted:
        console.print(f"streamfold {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fold streamed LLM rollouts into training samples, losing nothing.

    New here? [bold]streamfold demo[/] runs two rollouts on engines in a box, cuts and resumes, in a few seconds.

    Samples from your own engine? [bold]streamfold rollout[/] asks it for many, and goes on where it was interrupted.

    A stream went wrong? [bold]streamfold record[/] saves it as it comes, [bold]streamfold replay[/] shows what it holds
    and where it breaks.

    Writing a client, or a test? [bold]streamfold serve[/] runs the engine in a box: SGLang's or vLLM's HTTP interface
    with a deterministic model, no GPU and no weights.
    """


@app.command()
def demo(
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help='JSON lines like {"prompt": "..."}; 32 are built in.'),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = Path("demo.jsonl"),
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Whose HTTP interface.")] = "sglang",
    incremental: Annotated[
        bool, typer.Option("--incremental/--cumulative", help="How the engine writes its stream.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the engines' sampling.")] = 0,
) -> None:
    """Run two rollouts on two engines in a box, cut what is too much, resume it, and prove that nothing is lost.

    Exits with 0 only if every sample equals its undisturbed generation, no token was lost, each reward was computed
    exactly once, and every group is accounted for.
    """
    try:
        texts = job.read_prompts(prompts)
        check_out(out)
    except (OSError, ValueError) as error:
        fail(str(error))
    import_loopback()

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    report = job.run(texts, engine=engine, incremental=incremental, seed=seed, tell=tell)
    try:
        job.write(report.outcomes, out)
    except OSError as error:
        fail(f"{out} cannot be written: {error}")
    print_report(report)
    tell(f"The finished samples are in {out}")
    if report.problems:
        raise typer.Exit(1)


@app.command()
def serve(
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Whose HTTP interface.")] = "sglang",
    wire: Annotated[
        str, typer.Option(help="The release whose way of writing, as in 0.5.23 or 0.28, or rust; else the newest.")
    ] = "",
    host: Annotated[str, typer.Option(help="127.0.0.1, ::1, or 0.0.0.0 for everybody.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free one.")] = 30000,
    incremental: Annotated[
        bool, typer.Option("--incremental/--cumulative", help="Each event holds what is new, or everything.")
    ] = False,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens per event.")] = 1,
    token_rate: Annotated[
        float, typer.Option(min=0, help="Tokens per second and request; 0: as fast as it goes.")
    ] = 50,
    prefill_delay: Annotated[float, typer.Option(min=0, help="Seconds before the first token.")] = 0.05,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at once; others wait.")] = 256,
    seed: Annotated[int, typer.Option(help="The model's weights, so to speak.")] = 0,
    frontend: Annotated[Literal["python", "rust"], typer.Option(help="Whose way of writing.")] = "python",
    api_key: Annotated[str | None, typer.Option(help="Ask for this bearer token.")] = None,
    faults: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A script, in JSON, of how it misbehaves.")
    ] = None,
) -> None:
    """Run the engine in a box: SGLang's or vLLM's HTTP interface with a deterministic model, no GPU, no weights.

    Try it: [bold]curl -N localhost:30000/generate -d '{"text": "Hi", "stream": true}'[/]

    With --engine vllm: [bold]curl -N localhost:30000/v1/completions -H 'Content-Type: application/json' -d '{"prompt":
    "Hi", "stream": true}'[/]

    What a script of faults may hold: [bold]python -m pydoc streamfold.loopback.faults[/]
    """

    def ready(url: str) -> None:
        console.print(f"Engine in a box at {url} (Ctrl-C ends it)")

    loopback = import_loopback()
    try:
        loopback.serve(
            host=host,
            port=port,
            on_ready=ready,
            incremental=incremental,
            stream_interval=stream_interval,
            token_rate=token_rate,
            prefill_delay=prefill_delay,
            max_running_requests=batch_size,
            seed=seed,
            engine=engine,
            frontend="rust" if wire == "rust" else frontend,
            version="" if wire == "rust" else wire,
            api_key=api_key,
            faults=None if faults is None else loopback.Faults.read(faults),
        )
    except (OSError, ValueError) as error:
        fail(f"cannot serve: {error}")


@app.command()
def rollout(
    url: Annotated[str, typer.Option(help="The engine or router, as in http://10.0.0.1:30000.")],
    prompts: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help='JSON lines like {"prompt": "..."} or {"input_ids": [1, 2]}; or both.'
        ),
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go, and what an earlier run has left.")],
    engine: Annotated[
        Literal["sglang", "vllm", "vllm-completions", "auto"], typer.Option(help="What it is; auto asks it.")
    ] = "sglang",
    n_samples_per_prompt: Annotated[int, typer.Option("--n-samples-per-prompt", "-n", min=1)] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Samples in flight at once.")] = 64,
    max_new_tokens: Annotated[int | None, typer.Option(min=0, help="The budget of each response, else 1024.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a response; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Sample i gets the sampling_seed SEED + i.")] = None,
    sampling_params: Annotated[
        str | None, typer.Option(help="A JSON object with these or any others; the options above win.")
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs/--no-logprobs", help="Ask for log-probabilities.")] = True,
    experts: Annotated[
        str | None, typer.Option(help="LAYERS,TOP_K[,EXPERTS[,DTYPE]]: ask for routed experts. Needs prompts with ids.")
    ] = None,
    arrays: Annotated[
        Literal["lists", "npz"],
        typer.Option(help="What is one per token: in the line, or in OUT.arrays/ with one .npz for each sample."),
    ] = "lists",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A name or folder for transformers: makes ids of prompts that have none, chats included."),
    ] = None,
    eos_token_id: Annotated[
        list[int] | None,
        typer.Option(help="Ends a response; may be repeated. Else the tokenizer's, and what the engine stops at."),
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Calls for one sample at most, the first one included.")] = 6,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="STREAMFOLD_API_KEY")] = None,
) -> None:
    """Ask an engine for n samples of each prompt, and write each of them down as it ends, one JSON object a line.

    Interrupted? Run it again: finished samples are not asked for again, partial ones go on from their own tokens
    (those whose prompt came as a text, without ids, start again). Ctrl-C keeps what has arrived.

    Exits with 0 only if all samples are there, with 130 after Ctrl-C, otherwise with 1.
    """
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or None,
    }
    try:
        decoder, encode, ends = tokenizer_option(tokenizer)
        given = params_option(sampling_params)
        params = {**({} if "max_tokens" in given else {"max_new_tokens": 1024}), **given}
        params |= {name: value for name, value in options.items() if value is not None}
        plan = Plan(prompts, params, n=n_samples_per_prompt, seed=seed, encode=encode)
        shape = experts_option(experts)
        if shape is not None and plan.texts:
            fail(f"--experts: {plan.texts} prompts have no input_ids; give ids, or a --tokenizer")
        _check_ids(engine, plan)
        client = Client(
            url,
            engine=engine,
            api_key=api_key,
            tokenizer=decoder,
            limits=Limits(calls=concurrency),
            retries=Retries(tries=tries),
            experts=shape,
        )
        ends += eos_token_id or []
        with Journal(out, plan, arrays) as journal:
            work = _Work(plan, journal)

            def make() -> Coroutine[Any, Any, None]:
                _check_ids(client.engine, plan)  # auto has asked
                return complete_all(client, work, work.end, concurrency=concurrency, stop_ids=ends, logprobs=logprobs)

            interrupted = asyncio.run(_show(client, work, make))
    except (OSError, ValueError, EngineError) as error:  # the last one of a server that does not say what it is
        fail(str(error))
    missing = len(plan) - len(journal.finished)
    console.print(f"{len(journal.finished)} of {len(plan)} samples are in {out}", markup=False, soft_wrap=True)
    for message, count in work.failures.most_common(_SHOWN_FAILURES):
        errors.print(f"{count} failed: {message}", style="red", markup=False, soft_wrap=True)
    if missing:
        console.print(f"{missing} are missing, {len(journal.partial)} of them partial: the same command goes on there")
        raise typer.Exit(130 if interrupted else 1)


def _check_ids(engine: str, plan: Plan) -> None:
    if engine == "vllm" and plan.texts:
        raise ValueError(
            f"vLLM's token endpoint takes ids alone, but {plan.texts} prompts have none: give a --tokenizer, or say "
            "--engine vllm-completions"
        )


class _Work:
    """What is missing of a plan, sample by sample, and what came of it."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan = plan
        self._journal = journal
        self._begun: dict[int | None, tuple[int, int]] = {}  # tokens that a sample had, and had dropped
        self.failures: Counter[str] = Counter()
        self.tokens = 0
        self.restarted_tokens = 0

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self._plan)):
            if index not in self._journal.finished:
                sample = self._journal.partial.get(index) or self._plan[index]
                self._begun[index] = sample.response_length, sample.metadata.get("restarted_tokens", 0)
                yield sample

    def end(self, sample: Sample, error: Exception | None) -> None:
        """Write a sample down."""
        had, had_dropped = self._begun.pop(sample.index)
        self.tokens += max(0, sample.response_length - had)
        self.restarted_tokens += sample.metadata.get("restarted_tokens", 0) - had_dropped
        if error is not None:
            self.failures[f"{type(error).__name__}: {error}"] += 1
        if sample.response_length or sample.status in (sample.Status.COMPLETED, sample.Status.TRUNCATED):
            self._journal.write(sample)

    def show(self, progress: Progress, task: TaskID, running: int) -> None:
        """Bring the bar up to date; so many tokens of running calls count too."""
        rate = (self.tokens + running) / (progress.tasks[task].elapsed or 1.0)
        failed = sum(self.failures.values())
        progress.update(task, completed=len(self._journal.finished), total=len(self._plan), failed=failed, rate=rate)


def _interruptible(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that Ctrl-C and SIGTERM cancel."""
    made = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, made.cancel)
    return made


async def _show(client: Client, work: _Work, make: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """See the work done, or interrupted: which of the two."""
    text = "{task.completed} of {task.total}, {task.fields[failed]} failed, {task.fields[rate]:.0f} tokens/s"
    with progress_bar(text, target=errors) as progress:
        task = progress.add_task("rollout", failed=0, rate=0.0)
        async with client:
            made = _interruptible(make())  # a second signal ends the drains
            while not made.done():
                await asyncio.wait({made}, timeout=_SHOW_SECONDS)
                work.show(progress, task, sum(call.token_count for call in client.running))
    if work.restarted_tokens:
        errors.print(
            f"{work.restarted_tokens} tokens were dropped and asked for again: their prompts came without ids "
            "(--tokenizer makes some), or they ended in the middle of a stop string",
            soft_wrap=True,
        )
    if not made.cancelled():
        made.result()
    return made.cancelled()


@app.command()
def record(
    url: Annotated[str, typer.Option(help="The engine or router, as in http://10.0.0.1:30000.")],
    payload: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="The request's JSON object, as that engine takes it.")
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The stream; the rest is told beside it, in .json.")] = Path(
        "stream.sse"
    ),
    engine: Annotated[
        Literal["sglang", "vllm", "vllm-completions"], typer.Option(help="Whose endpoint takes the request.")
    ] = "sglang",
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
) -> None:
    """Send one request and save the reply as it comes, byte for byte, with the time of each read.

    It goes to SGLang's /generate, with --engine vllm to /inference/v1/generate, with vllm-completions to
    /v1/completions: there replay needs "return_token_ids": true in the payload, which is sent as it is, but streamed.

    Ctrl-C ends it and keeps what has come. Look into it with [bold]streamfold replay[/].
    """
    try:
        request = json.loads(payload.read_bytes())
    except ValueError as error:
        fail(f"{payload} is no JSON: {error}")
    if not isinstance(request, dict):
        fail(f"{payload} must hold a JSON object: the body of a POST to {ENGINES[engine].path}")
    beside = out.with_suffix(".json")
    if out == beside or payload.resolve() in (out.resolve(), beside.resolve()):
        fail(f"--out {out}: the stream and {beside}, which tells of it, need names of their own")
    saved = Recording(b"", request=request, engine=engine)
    with progress_bar("{task.fields[size]} bytes in {task.fields[reads]} reads", target=errors) as progress:
        task = progress.add_task("recording", total=None, size=0, reads=0)

        def count(size: int) -> None:
            fields = progress.tasks[task].fields
            progress.update(task, size=fields["size"] + size, reads=fields["reads"] + 1)

        async def work() -> None:
            made = _interruptible(record_stream(url, saved, headers=headers, on_read=count))
            await asyncio.wait({made})
            if not made.cancelled():
                made.result()

        try:
            check_out(out)
            headers = {} if api_key is None else {"Authorization": bearer(api_key)}
            asyncio.run(work())
        except ValueError as error:
            fail(str(error))
    if saved.status is None:
        errors.print(f"streamfold: no reply from {url}: {saved.end}", style="red", markup=False)
        raise typer.Exit(1)
    try:
        saved.save(out)
    except OSError as error:
        fail(f"{out} cannot be written: {error}")
    console.print(f"HTTP {saved.status}, {len(saved.body)} bytes in {len(saved.reads)} reads, ended by {saved.end}")
    told = f"Saved to {out} and {beside}; look into it: streamfold replay {shlex.quote(str(out))}"
    console.print(told, markup=False, soft_wrap=True)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A recorded stream.")],
    dialect: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(DIALECTS)}; else that of the recorded engine.")
    ] = None,
    logprobs: Annotated[
        bool | None, typer.Option("--logprobs/--no-logprobs", help="Whether they were asked for; else as recorded.")
    ] = None,
    experts: Annotated[
        str | None, typer.Option(help="LAYERS,TOP_K[,EXPERTS[,DTYPE]] of routed experts, to check their shape.")
    ] = None,
) -> None:
    """Feed a recorded stream to the parser, in the pieces in which it came, and print what it holds.

    If it breaks: the error, and the bytes around the place. Exits with 1 then.
    """
    try:
        recording = Recording.load(file)
        parser = recording.parser(dialect, logprobs=logprobs, experts=experts_option(experts))
    except (OSError, ValueError) as failure:
        fail(str(failure))
    if recording.status not in (None, 200):
        errors.print(f"HTTP {recording.status}: this is no stream", style="red")
    if not recording.request and logprobs is None:
        read_as = "" if dialect else ", --dialect what is not SGLang's"
        console.print(
            f"What was asked is not known (no .json beside it): --logprobs reads log-probabilities too{read_as}",
            soft_wrap=True,
        )
    generation, error = recording.replay(parser)
    print_generation(generation, len(recording.body))
    if error is not None:
        errors.print(f"\n{type(error).__name__}: {error}", style="red", markup=False)
        if isinstance(error, DecodeError):
            errors.print(surroundings(recording.body, error), markup=False, soft_wrap=True)
        raise typer.Exit(1)
