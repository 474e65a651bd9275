"""The task of the training demo: prompts that ask for digits or for capital letters, and the rule that judges."""

from __future__ import annotations

import codecs
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
        ValueError: a line is anything else, its label is unknown, or there is no line; the message names the line.
    """
    source = importlib.resources.files("streamfold.training") / "prompts.jsonl" if path is None else path
    lines = source.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    prompts = [_prompt(line, f"{source}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{source} holds no prompt")
    return prompts


def _prompt(line: bytes, place: str) -> dict[str, Any]:
    try:
        prompt: dict[str, Any] = orjson.loads(line)
        label, _ = prompt["label"], prompt["prompt"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f'{place}: not a JSON object like {{"prompt": "...", "label": "digits"}}') from None
    if label not in list(_IS_RIGHT):  # a list: the label may be of any type
        raise ValueError(f"{place}: the label is {label!r}, not one of {', '.join(_IS_RIGHT)}")
    return prompt


def reward(sample: Sample) -> float:
    """The share of characters of the response, spaces apart, that are what the label asks for: 0 to 1."""
    characters = "".join(sample.response.split())
    is_right = _IS_RIGHT[sample.label]
    return sum(map(is_right, characters)) / len(characters) if characters else 0.0
