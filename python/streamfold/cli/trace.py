"""``streamfold trace``: draws the timeline of a trace file as a picture."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated

import typer

from streamfold.cli.console import console, fail, print_json
from streamfold.cli.files import check_different, check_replaced, is_png
from streamfold.cli.printing import AsJson, Quiet  # noqa: TC001  # typer reads the annotations
from streamfold.cli.waterfall import Waterfall, draw, read_trace
from streamfold.rollout.atomic_file import save_error

__all__ = ["command"]


def command(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Trace of streamfold rollout --trace, or of a Trace.")
    ],
    png: Annotated[
        Path, typer.Option(dir_okay=False, help="File for the picture; a PNG that is there is replaced, no other file.")
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Draw a trace as a picture: one row for each sample, with what it waited for.

    The file itself opens at https://ui.perfetto.dev. Needs the extra plot.
    """
    try:
        check_different(file=file, png=png)
        check_replaced("--png", png, "a PNG", is_png)
        waterfall = Waterfall.of(read_trace(file))
    except (OSError, ValueError) as error:
        fail(str(error))
    try:
        draw(waterfall, png)
    except ImportError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{png} cannot be written: {save_error(error, png)}")
    if as_json:
        print_json({"rows": len(waterfall.rows), "png": str(png)})
    elif not quiet:
        console.print(f"{len(waterfall.rows)} samples and calls are in {png}")
