"""The command line: ``streamfold demo | serve | rollout | record | replay``."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamfold import demo as job
from streamfold._core import DIALECTS, Experts, Generation, __version__
from streamfold.client import Client
from streamfold.errors import DecodeError
from streamfold.journal import Journal, Plan
from streamfold.limits import Limits
from streamfold.recording import Recording, surroundings
from streamfold.recording import record as record_stream
from streamfold.rollout import Retries, Rollout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from streamfold.journal import Encode
    from streamfold.sample import Sample

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
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

    New here? [bold]streamfold demo[/] streams, cuts and resumes against an engine in a box, in a few seconds.

    Samples from your own engine? [bold]streamfold rollout[/] asks it for many, and goes on where it was interrupted.

    A stream went wrong? [bold]streamfold record[/] saves it as it comes, [bold]streamfold replay[/] shows what it holds
    and where it breaks.

    Writing a client, or a test? [bold]streamfold serve[/] runs the engine in a box: SGLang's HTTP interface with a
    deterministic model, no GPU and no weights.
    """


@app.command()
def demo(
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help='JSON lines like {"prompt": "..."}; 32 are built in.'),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = Path("demo.jsonl"),
    incremental: Annotated[
        bool, typer.Option("--incremental/--cumulative", help="How the engine writes its stream.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the engine's sampling, and of the cuts.")] = 0,
) -> None:
    """Stream 16 prompts at once from an engine in a box, cut some, resume them, and prove that nothing is lost.

    Exits with 0 only if every sample equals its undisturbed generation.
    """
    try:
        texts = job.read_prompts(prompts)
    except ValueError as error:
        _fail(str(error))
    engine = _loopback().Loopback(
        incremental=incremental, token_rate=150.0, prefill_delay=0.03, stop_probability=1 / 200
    )
    with engine, _progress("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s") as progress:
        console.print(f"Engine in a box at {engine.url}, {len(texts)} prompts, {job.AT_ONCE} streams at once")
        task = progress.add_task("streaming", total=None, tokens=0, rate=0.0)
        total = 0

        def count(more: int) -> None:
            nonlocal total
            total += more
            elapsed = progress.tasks[task].elapsed or 1.0
            progress.update(task, tokens=total, rate=total / elapsed)

        outcomes = asyncio.run(job.run(engine, texts, seed=seed, on_tokens=count))
        progress.update(task, total=1, completed=1)
    job.write(outcomes, out)
    _print_outcomes(outcomes)
    console.print(f"Samples written to {out}")
    if not all(outcome.equal for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="127.0.0.1, ::1, or 0.0.0.0 for everybody.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one.")] = 30000,
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
    wire: Annotated[str, typer.Option(help="The SGLang release whose way of writing.")] = "0.5.23",
    api_key: Annotated[str | None, typer.Option(help="Ask for this bearer token.")] = None,
) -> None:
    """Run the engine in a box: SGLang's HTTP interface with a deterministic model, no GPU, no weights.

    Try it: [bold]curl -N localhost:30000/generate -d '{"text": "Hi", "stream": true}'[/]
    """

    def ready(url: str) -> None:
        console.print(f"Engine in a box at {url} (Ctrl-C ends it)")

    try:
        _loopback().serve(
            host=host,
            port=port,
            on_ready=ready,
            incremental=incremental,
            stream_interval=stream_interval,
            token_rate=token_rate,
            prefill_delay=prefill_delay,
            max_running_requests=batch_size,
            seed=seed,
            frontend=frontend,
            version=wire,
            api_key=api_key,
        )
    except (OSError, ValueError) as error:
        _fail(f"cannot serve: {error}")


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
        encode, ends = _tokenizer(tokenizer)
        params = {"max_new_tokens": 1024, **_sampling_params(sampling_params)}
        params |= {name: value for name, value in options.items() if value is not None}
        plan = Plan(prompts, params, n=n_samples_per_prompt, seed=seed, encode=encode)
        shape = _experts(experts)
        if shape is not None and plan.texts:
            _fail(f"--experts: {plan.texts} prompts have no input_ids; give ids, or a --tokenizer")
        client = Client(url, api_key=api_key, limits=Limits(calls=concurrency), experts=shape)
        run = Rollout(
            client,
            concurrency=concurrency,
            retries=Retries(tries=tries),
            stop_ids=[*ends, *(eos_token_id or [])],
            logprobs=logprobs,
            experts=shape is not None,
        )
        with Journal(out, plan, arrays) as journal:
            interrupted, failures = asyncio.run(_roll(client, run, plan, journal))
    except (OSError, ValueError) as error:
        _fail(str(error))
    missing = len(plan) - len(journal.finished)
    console.print(f"{len(journal.finished)} of {len(plan)} samples are in {out}", markup=False, soft_wrap=True)
    for message, count in failures.most_common(_SHOWN_FAILURES):
        errors.print(f"{count} failed: {message}", style="red", markup=False, soft_wrap=True)
    if missing:
        console.print(f"{missing} are missing, {len(journal.partial)} of them partial: the same command goes on there")
        raise typer.Exit(130 if interrupted else 1)


async def _roll(client: Client, run: Rollout, plan: Plan, journal: Journal) -> tuple[bool, Counter[str]]:
    """Make what is missing; whether it was interrupted, and how often what went wrong."""
    failures: Counter[str] = Counter()
    failed = 0
    text = "{task.completed} of {task.total}, {task.fields[failed]} failed, {task.fields[rate]:.0f} tokens/s"
    with _progress(text, target=errors) as progress:
        task = progress.add_task("rollout", total=len(plan), completed=len(journal.finished), failed=0, rate=0.0)

        def on_end(sample: Sample, error: Exception | None) -> None:
            nonlocal failed
            if sample.response_length or sample.status in (sample.Status.COMPLETED, sample.Status.TRUNCATED):
                journal.write(sample)
            if error is not None:
                failed += 1
                failures[f"{type(error).__name__}: {error}"] += 1

        async def show() -> None:
            while True:
                rate = run.tokens / (progress.tasks[task].elapsed or 1.0)
                progress.update(task, completed=len(journal.finished), failed=failed, rate=rate)
                await asyncio.sleep(_SHOW_SECONDS)

        missing = (index for index in range(len(plan)) if index not in journal.finished)
        making = asyncio.ensure_future(run.run((journal.partial.get(i) or plan[i] for i in missing), on_end))
        showing = asyncio.ensure_future(show())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, making.cancel)  # a second one ends the drains
        try:
            async with client:
                await asyncio.wait({making})
        finally:
            showing.cancel()
    if run.restarted_tokens:
        errors.print(
            f"{run.restarted_tokens} tokens were dropped and asked for again: their prompts came without ids "
            "(--tokenizer makes some), or they ended in the middle of a stop string",
            soft_wrap=True,
        )
    if not making.cancelled():
        making.result()
    return making.cancelled(), failures


@app.command()
def record(
    url: Annotated[str, typer.Option(help="The engine or router, as in http://10.0.0.1:30000.")],
    payload: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="The request's JSON object, as the engine takes it.")
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The stream; the rest is told beside it, in .json.")] = Path(
        "stream.sse"
    ),
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
) -> None:
    """Send one request and save the reply as it comes, byte for byte, with the time of each read.

    Ctrl-C ends it and keeps what has come. Look into it with [bold]streamfold replay[/].
    """
    try:
        request = json.loads(payload.read_bytes())
    except ValueError as error:
        _fail(f"{payload} is no JSON: {error}")
    if not isinstance(request, dict):
        _fail(f'{payload} must hold a JSON object, as in {{"text": "Hi", "sampling_params": {{}}}}')
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with _progress("{task.fields[size]} bytes in {task.fields[reads]} reads", target=errors) as progress:
        task = progress.add_task("recording", total=None, size=0, reads=0)

        def count(size: int) -> None:
            fields = progress.tasks[task].fields
            progress.update(task, size=fields["size"] + size, reads=fields["reads"] + 1)

        try:
            saved = asyncio.run(record_stream(url, request, headers=headers, on_read=count))
        except ValueError as error:
            _fail(str(error))
    if saved.status is None:
        errors.print(f"streamfold: no reply from {url}: {saved.end}", style="red", markup=False)
        raise typer.Exit(1)
    saved.save(out)
    console.print(f"HTTP {saved.status}, {len(saved.body)} bytes in {len(saved.reads)} reads, ended by {saved.end}")
    console.print(f"Saved to {out} and {out.with_suffix('.json')}; look into it: streamfold replay {out}")


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A recorded stream.")],
    dialect: Annotated[str, typer.Option(help=f"One of {', '.join(DIALECTS)}.")] = "sglang",
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
        parser = recording.parser(dialect, logprobs=logprobs, experts=_experts(experts))
    except (OSError, ValueError) as failure:
        _fail(str(failure))
    if recording.status not in (None, 200):
        errors.print(f"HTTP {recording.status}: this is no stream", style="red")
    if not recording.request and logprobs is None:
        console.print("What was asked is not known (no .json beside it): --logprobs reads log-probabilities too")
    generation, error = recording.replay(parser)
    _print_generation(generation, len(recording.body))
    if error is not None:
        errors.print(f"\n{type(error).__name__}: {error}", style="red", markup=False)
        if isinstance(error, DecodeError):
            errors.print(surroundings(recording.body, error), markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _print_outcomes(outcomes: Sequence[job.Outcome]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("prompt", no_wrap=True, max_width=16)
    for name in ("tokens", "mean\nlogprob", "first\ntoken", "tokens\n/s", "aborted", "resumed", "lost", "equal"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, name.split("\n"))))
    for outcome in outcomes:
        table.add_row(
            outcome.prompt,
            str(len(outcome.token_ids)),
            f"{outcome.mean_logprob:.2f}",
            f"{outcome.first_token * 1000:.0f} ms",
            f"{outcome.tokens_per_second:.0f}",
            str(outcome.aborted or ""),
            str(outcome.resumed or ""),
            str(outcome.lost),
            "yes" if outcome.equal else "NO",
        )
    console.print(table)
    tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    equal = sum(outcome.equal for outcome in outcomes)
    console.print(
        f"{equal} of {len(outcomes)} samples equal the undisturbed generation: {tokens} tokens, "
        f"aborted {sum(outcome.aborted for outcome in outcomes)}, "
        f"resumed {sum(outcome.resumed for outcome in outcomes)}, lost = {sum(outcome.lost for outcome in outcomes)}",
        style="bold green" if equal == len(outcomes) else "bold red",
    )


def _print_generation(generation: Generation, size: int) -> None:
    facts: dict[str, Any] = {
        "bytes": size,
        "tokens": len(generation.token_ids),
        "finish reason": generation.finish_reason or "none: the stream was cut",
        "matched": generation.matched,
        "prompt tokens": generation.prompt_tokens,
        "cached tokens": generation.cached_tokens,
        "versions": ", ".join(f"{name} [{start}, {end})" for name, start, end in generation.version_spans) or None,
        "token ids": _shortened(generation.token_ids.tolist()),
        "logprobs": None if generation.logprobs is None else _shortened(generation.logprobs.tolist()),
        "text": None if generation.text is None else json.dumps(generation.text, ensure_ascii=False),
        "experts": None if generation.routed_experts is None else _described(generation.routed_experts),
        "top-p": None if generation.top_p is None else f"{len(generation.top_p[0])} ids",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in [*facts.items(), *((f"meta.{key}", value) for key, value in generation.meta.items())]:
        if value is not None:
            table.add_row(name, str(value).replace("[", "\\["))
    console.print(table)


def _shortened(values: list[Any], most: int = 12) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown if len(values) <= most else f"{shown}, … ({len(values)} in all)"


def _described(array: Any) -> str:  # noqa: ANN401  # an array of any dtype
    return f"{array.dtype} {array.shape}"


def _experts(text: str | None) -> Experts | None:
    if text is None:
        return None
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts[:3]]
        return Experts(*numbers, *parts[3:])  # type: ignore[arg-type]  # it checks the dtype itself
    except (TypeError, ValueError) as error:
        raise ValueError(f"--experts {text}: LAYERS,TOP_K[,EXPERTS[,DTYPE]] was expected ({error})") from None


def _sampling_params(text: str | None) -> dict[str, Any]:
    try:
        params = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--sampling-params is no JSON: {error}") from None
    if not isinstance(params, dict):
        raise ValueError('--sampling-params: a JSON object like {"min_p": 0.1} was expected')
    return params


def _tokenizer(name: str | None) -> tuple[Encode | None, list[int]]:
    """What makes ids of a prompt, and the tokens that end a response."""
    if name is None:
        return None, []
    try:
        transformers = importlib.import_module("transformers")  # heavy, and not needed otherwise
    except ImportError:
        raise ValueError("--tokenizer needs transformers: pip install transformers") from None
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)

    def encode(prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _progress(text: str, *, target: Console = console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn(text), TimeElapsedColumn())
    return Progress(*columns, console=target, transient=True)


def _loopback() -> ModuleType:
    try:
        from streamfold import loopback  # noqa: PLC0415  # an extra: only two commands need it
    except ImportError as error:
        _fail(str(error))
    return loopback


def _fail(message: str) -> NoReturn:
    errors.print(f"streamfold: {message}", style="red", markup=False)
    sys.exit(2)
