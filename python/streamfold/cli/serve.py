"""``streamfold serve``: runs a loopback engine with the API of SGLang or vLLM until it is interrupted."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated, Final, Literal

import typer

from streamfold.cli.console import console, fail, import_loopback, print_json
from streamfold.cli.printing import AsJson, Quiet  # noqa: TC001  # typer reads the annotations

__all__ = ["EXAMPLES", "command"]

# Lines behind a backspace are not wrapped.
EXAMPLES: Final = """\b
Try it:
  curl -N --json '{"text": "Hi", "stream": true}' localhost:30000/generate

\b
With --engine vllm:
  curl -N --json '{"prompt": "Hi", "stream": true}' \\
    localhost:30000/v1/completions

\b
A real model, on the CPU:
  streamfold serve --model hf:PATH

\b
The format of the --faults file:
  python -m pydoc streamfold.loopback.faults
"""


def command(
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Engine whose HTTP API is emulated.")] = "sglang",
    wire: Annotated[
        str,
        typer.Option(
            help="Engine version to emulate: SGLang 0.5.10 to 0.5.23 (incremental from 0.5.11), vLLM 0.20 to 0.33; "
            '"rust": short for the newest version plus --frontend rust. Default: 0.5.23, or 0.32 of vLLM.'
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="mock|hf:PATH",
            help="The deterministic mock model, or a causal language model in a directory, which needs the extra hf.",
        ),
    ] = "mock",
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Compute each request of a real model alone: its numbers do not depend on those beside it.",
        ),
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen at: 127.0.0.1, ::1, or 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: any free port.")] = 30000,
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental/--cumulative",
            help="Whether each SGLang event holds only the new tokens or the whole response so far. Ignored for "
            "vLLM, which sends only new tokens.",
        ),
    ] = False,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens per event.")] = 1,
    token_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Tokens per second for each request; 0: as fast as possible. Default: 50, of a real model 0.",
            show_default=False,
        ),
    ] = None,
    prefill_delay: Annotated[
        float | None,
        typer.Option(
            min=0, help="Time to first token, in seconds. Default: 0.05, of a real model 0.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run at once; others are queued.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the mock model: another seed generates other tokens.")] = 0,
    sampling_seed: Annotated[
        int, typer.Option(help="Seed of the engine's generator, which seeds each request that names no seed.")
    ] = 0,
    frontend: Annotated[
        Literal["python", "rust"],
        typer.Option(help="Emulate the JSON formatting of the engine's Python or Rust API server."),
    ] = "python",
    api_key: Annotated[
        str | None, typer.Option(help="Require this bearer token. Default: requests need no token.")
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON file with faults to inject, such as resets and errors."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a loopback engine: the HTTP API of SGLang or vLLM, with a mock model (no GPU, no weights) or a real one.

    Ctrl-C stops it.
    """
    loopback = import_loopback()
    mock = model == "mock"
    try:
        loopback.serve(
            host=host,
            port=port,
            on_ready=lambda url: _print_url(url, as_json=as_json, quiet=quiet),
            incremental=incremental,
            stream_interval=stream_interval,
            model=model,
            batch_invariant=batch_invariant,
            token_rate=(50 if mock else 0) if token_rate is None else token_rate,
            prefill_delay=(0.05 if mock else 0) if prefill_delay is None else prefill_delay,
            max_running_requests=batch_size,
            seed=seed,
            sampling_seed=sampling_seed,
            engine=engine,
            frontend="rust" if wire == "rust" else frontend,
            version="" if wire == "rust" else wire,
            api_key=api_key,
            faults=None if faults is None else loopback.Faults.read(faults),
        )
    except (ImportError, OSError, ValueError) as error:
        fail(f"cannot serve: {error}")


def _print_url(url: str, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json({"url": url})
    elif not quiet:
        console.print(f"Loopback engine at {url} (Ctrl-C stops it)")
