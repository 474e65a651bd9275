"""The task of the training demo: prompts that ask for digits or for capital letters, and the rule that judges."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from streamfold.samples.sample import Sample

__all__ = ["read_prompts", "reward"]

_IS_RIGHT: Final[Mapping[str, Callable[[str], bool]]] = {
    "digits": lambda character: "0" <= character <= "9",
    "capitals": lambda character: "A" <= character <= "Z",
}


def read_prompts(path: Path | None = None) -> list[dict[str, Any]]:
    """The prompts of a file, with ``prompt`` and ``label`` in each line; None: those that come with the package.

    Raises:
        ValueError: a label is unknown; the message names the line.
    """
    source = importlib.resources.files("streamfold.training") / "prompts.jsonl" if path is None else path
    prompts = [orjson.loads(line) for line in source.read_bytes().splitlines()]
    for number, prompt in enumerate(prompts, start=1):
        if prompt["label"] not in _IS_RIGHT:
            raise ValueError(
                f"{source}, line {number}: the label is {prompt['label']!r}, not one of {', '.join(_IS_RIGHT)}"
            )
    return prompts


def reward(sample: Sample) -> float:
    """The share of characters of the response, spaces apart, that are what the label asks for: 0 to 1."""
    characters = "".join(sample.response.split())
    is_right = _IS_RIGHT[sample.label]
    return sum(map(is_right, characters)) / len(characters) if characters else 0.0
