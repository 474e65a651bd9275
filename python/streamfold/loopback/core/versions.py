"""SGLang and vLLM versions that the loopback engine can emulate: newest, oldest, and how a version is parsed."""

from __future__ import annotations

__all__ = ["NEWEST", "check_version", "parse_version"]

Release = tuple[int, ...]

# Emulated if no version is given.
NEWEST = {"sglang": "0.5.23", "vllm": "0.32.0"}

_EXAMPLES = {"sglang": "0.5.23 or 0.5.15.post1", "vllm": "0.32.0 or 0.28"}
# How many numbers of a version matter: patch releases of vLLM do not change what it writes.
_NUMBERS = {"sglang": 3, "vllm": 2}
# By engine and stream mode. Earlier incremental streams of SGLang lost ids, or repeated all logprobs in each event.
_OLDEST = {("vllm", ""): (0, 20), ("sglang", "cumulative"): (0, 5, 10), ("sglang", "incremental"): (0, 5, 11)}
_LATEST = {"sglang": (0, 5, 23), "vllm": (0, 33)}


def parse_version(engine: str, version: str) -> Release:
    """Parse a version into numbers: three for SGLang, two for vLLM; suffixes such as ``.post1`` are ignored.

    Raises:
        ValueError: it does not start with that many numbers.
    """
    count = _NUMBERS[engine]
    parts = version.split(".")[:count]
    try:
        numbers = tuple(int(part) for part in parts)
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        msg = f"version must look like {_EXAMPLES[engine]}, got {version!r}"
        raise ValueError(msg)
    return numbers


def check_version(engine: str, version: str, *, incremental: bool = False) -> None:
    """Check that an engine version can be emulated. ``incremental`` is SGLang's stream mode.

    Raises:
        ValueError: the version is older or newer than those known here, or cannot be parsed. The message names them.
    """
    release = parse_version(engine, version)
    mode = "" if engine == "vllm" else "incremental" if incremental else "cumulative"
    oldest, latest = _OLDEST[engine, mode], _LATEST[engine]
    if not oldest <= release <= latest:
        streams = f"SGLang's {mode} stream is emulated as from" if mode else "vLLM streams tokens from"
        msg = f"{streams} {_dotted(oldest)} on, and is known up to {_dotted(latest)}; got version {version!r}"
        raise ValueError(msg)


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
