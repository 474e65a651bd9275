"""Reads transformers' models from a directory, quietly, and never from anywhere else."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LOCAL", "checked", "empty_network", "read_config", "read_network"]

# Code of the directory is never run, and nothing is fetched.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def checked(path: str) -> str:
    """Return the path if it is a directory: transformers would take anything else for a name in a registry.

    Raises:
        NotADirectoryError: it is none.
    """
    if not Path(path).is_dir():
        msg = f"there is no directory {path!r} with a model"
        raise NotADirectoryError(msg)
    return path


def read_config(path: str) -> Any:  # noqa: ANN401  # transformers' PreTrainedConfig, untyped here
    """Read the configuration of a model. Raises OSError or ValueError."""
    return AutoConfig.from_pretrained(checked(path), **LOCAL)


def empty_network(config: Any) -> Any:  # noqa: ANN401  # as above
    """Return the model without memory for its weights. Raises ValueError if it is no causal language model."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def read_network(path: str, config: Any, dtype: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401  # as above
    """Read a model with its weights.

    Args:
        path: the directory.
        config: its configuration, or that of the model that it must fit.
        dtype: a torch dtype; "auto": that of the weights.

    Returns:
        The model, and transformers' report: the names of weights that are missing, left over or of another shape.

    Raises:
        OSError: there is no such directory, or no safetensors file in it.
    """
    with _quiet():
        network, report = AutoModelForCausalLM.from_pretrained(
            checked(path),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them
            **LOCAL,
        )
    return network, report


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bar and no warning of what the report has."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
