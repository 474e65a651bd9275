"""The command line: ``streamfold demo | serve | record | replay``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamfold import demo as job
from streamfold._core import DIALECTS, Experts, Generation, __version__
from streamfold.errors import DecodeError
from streamfold.recording import Recording, surroundings
from streamfold.recording import record as record_stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


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
    saved.save(out)
    console.print(f"HTTP {saved.status}, {len(saved.body)} bytes in {len(saved.reads)} reads, ended by {saved.end}")
    console.print(f"Saved to {out} and {out.with_suffix('.json')}; look into it: streamfold replay {out}")
    if saved.status is None:
        raise typer.Exit(1)


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
    generation, error = recording.replay(parser)
    _print_generation(generation, len(recording.body))
    if error is not None:
        errors.print(f"\n{type(error).__name__}: {error}", style="red", markup=False)
        if isinstance(error, DecodeError):
            errors.print(surroundings(recording.body, error), markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _print_outcomes(outcomes: Sequence[job.Outcome]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("prompt", no_wrap=True, max_width=20)
    for name in ("tokens", "mean\nlogprob", "first\ntoken", "tokens\n/s", "aborted", "resumed", "lost", "equal"):
        table.add_column(name, justify="right")
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
