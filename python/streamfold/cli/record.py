"""``streamfold record``: sends one request and saves the response byte for byte, with the time of each read."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from streamfold.cli.console import cancel_on_signals, console, errors, fail, print_json, progress_bar
from streamfold.cli.files import check_different, check_out
from streamfold.cli.printing import AsJson, Quiet, Verbose, output
from streamfold.cli.recording import Recording, check_replaced_recording, record
from streamfold.engines.detect import ENGINES
from streamfold.rollout.atomic_file import save_error

__all__ = ["command"]

_SHOWN_BYTES: Final = 1000  # of an error


def command(
    url: Annotated[str, typer.Option(help="URL of the engine or router, such as http://10.0.0.1:30000.")],
    payload: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help="JSON file with the body of the request, in the format of the engine."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            help="File for the body of the response. Request, response headers and read times go to a .json file of "
            "the same name. A recording that is there is replaced, any other file is not.",
        ),
    ] = Path("stream.sse"),
    engine: Annotated[
        Literal["sglang", "vllm", "vllm-completions"],
        typer.Option(
            help="Endpoint: sglang: /generate; vllm: /inference/v1/generate; vllm-completions: /v1/completions."
        ),
    ] = "sglang",
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token to send. Default: none.", envvar="STREAMFOLD_API_KEY")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Send one request and save the response byte for byte, with the time of each read.

    The payload is sent unchanged, except that "stream" is set to true, and that a
    request id is added if it has none. With vllm-completions put
    "return_token_ids": true into it, as replay needs the token ids.

    Ctrl-C, SIGTERM and SIGHUP abort the request at the engine, as the client aborts
    a call, and keep what was received; a second signal does not wait for the end of
    the stream. Read the recording with "streamfold replay".

    Exits with 0 if the status of the response is below 400, otherwise with 1.
    """
    recording = Recording(b"", request=_read_payload(payload, engine), engine=engine)
    details = out.with_suffix(".json")
    try:
        _check_files(payload, out, details)
        check_out(out)
        check_replaced_recording(out)
        with output(verbose=verbose, quiet=quiet):
            asyncio.run(_record(url, recording, api_key, quiet=quiet))
    except (OSError, ValueError) as error:
        fail(str(error))
    if recording.status is None:
        errors.print(f"streamfold: no reply from {url}: {recording.end}", style="red")
        raise typer.Exit(1)
    try:
        recording.save(out)
    except OSError as error:
        fail(f"{out} cannot be written: {save_error(error, out)}")
    size, reads = len(recording.body), len(recording.reads)
    if as_json:
        files = {"out": str(out), "details": str(details)}
        print_json({**files, "status": recording.status, "bytes": size, "reads": reads, "end": recording.end})
    elif not quiet:
        console.print(f"HTTP {recording.status}, {size} bytes in {reads} reads, ended by {recording.end}")
        hint = f"Saved to {out} and {details}. To parse it: streamfold replay {shlex.quote(str(out))}"
        console.print(hint)
    if recording.status >= 400:
        errors.print(f"streamfold: the engine refused the request with HTTP {recording.status}", style="red")
        errors.print(recording.body[:_SHOWN_BYTES].decode(errors="replace"))
        raise typer.Exit(1)


def _check_files(payload: Path, out: Path, details: Path) -> None:
    """Check that the three files are three.

    Raises:
        ValueError: they are not.
    """
    try:
        check_different(payload=payload, out=out, details=details)
    except ValueError:
        words = f"the payload, the stream and {details} with its details must be three different files"
        raise ValueError(f"--out {out}: {words}") from None


def _read_payload(path: Path, engine: str) -> dict[str, Any]:
    try:
        request = json.loads(path.read_bytes())
    except ValueError as error:
        fail(f"{path} is not JSON: {error}")
    if not isinstance(request, dict):
        fail(f"{path} must hold a JSON object, the body of a POST to {ENGINES[engine].path}")
    return request


async def _record(url: str, recording: Recording, api_key: str | None, *, quiet: bool) -> None:
    text = "{task.fields[size]} bytes in {task.fields[reads]} reads"
    with progress_bar(text, target=errors, disable=quiet) as progress:
        bar = progress.add_task("recording", total=None, size=0, reads=0)

        def count(size: int) -> None:
            fields = progress.tasks[bar].fields
            progress.update(bar, size=fields["size"] + size, reads=fields["reads"] + 1)

        task = cancel_on_signals(record(url, recording, api_key=api_key, on_read=count))
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
