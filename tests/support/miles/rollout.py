"""miles's calls of a generate function: ``miles.rollout.base_types``, ``.inference_rollout`` and what they load."""

from __future__ import annotations

import asyncio
import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from support.host.slime.utils.misc import SingletonMeta
from support.host.slime.utils.processing_utils import load_processor, load_tokenizer
from support.miles.types import Sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace


@dataclass(frozen=True)
class GenerateFnInput:
    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> SimpleNamespace:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Sample | list[Sample]


class GenerateState:
    """What the generations of one rollout function share; each rollout function has one of its own."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = load_processor(args.hf_checkpoint)
        self.generate_fn_semaphore = asyncio.Semaphore(64)
        self.sampling_params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 32}
        self.generate_function = load_generate_function(args.custom_generate_function_path)
        self.reset()

    def reset(self) -> None:
        self.aborted = False


class LegacyGenerateState(GenerateState, metaclass=SingletonMeta):
    """That of ``miles.rollout.sglang_rollout``: one for the process."""


def load_function(path: str | Callable[..., Any] | None) -> Any:
    """The function at a dotted path; the stand-in takes the function too."""
    if path is None or not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def load_generate_function(path: str | Callable[..., Any] | None) -> Any:
    """A function of GenerateFnInput: a class is created, one of the older signature is wrapped."""
    function = load_function(path)
    if function is None:
        return None
    if inspect.isclass(function):
        return function()
    names = list(inspect.signature(function).parameters)
    return _wrapped(function, names) if len(names) >= 3 and names[0] != "input" else function


def _wrapped(function: Callable[..., Any], names: list[str]) -> Any:
    async def generate(given: GenerateFnInput) -> GenerateFnOutput:
        options = {"evaluation": given.evaluation} if "evaluation" in names else {}
        made = await function(given.args, given.sample, given.sampling_params, **options)
        return made if isinstance(made, GenerateFnOutput) else GenerateFnOutput(samples=made)

    return generate


async def generate_and_rm(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generate one sample, with a reward unless it is aborted."""
    args = state.args
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}:
        assert sample.reward is not None
        return sample
    async with state.generate_fn_semaphore:
        if state.aborted:
            sample.status = sample.Status.ABORTED
            return sample
        function = load_generate_function(sample.generate_function_path) or state.generate_function
        output = await function(
            GenerateFnInput(
                state=state, sample=sample, sampling_params=copy.deepcopy(sampling_params), evaluation=evaluation
            )
        )
    made = output.samples
    if made.status is not made.Status.ABORTED and made.reward is None:
        made.reward = 1.0
    return made


async def abort(state: GenerateState) -> None:
    """Set the flag, then abort whole servers."""
    assert not state.aborted
    state.aborted = True
    async with httpx.AsyncClient(verify=False) as client:
        url = f"http://{state.args.sglang_router_ip}:{state.args.sglang_router_port}"
        await client.post(f"{url}/abort_request", json={"abort_all": True})


def compute_prompt_ids_from_sample(state: GenerateState, sample: Sample, tools: Any = None) -> list[int]:
    """Tokenize the prompt; with images, keep what the processor makes for training."""
    inputs = sample.multimodal_inputs or {}
    if state.processor is not None and any(value is not None for value in inputs.values()):
        assert isinstance(sample.prompt, str)
        made = state.processor(text=sample.prompt, **inputs)
        sample.multimodal_train_inputs = {"pixel_values": made["pixel_values"]}
        ids: list[int] = made["input_ids"][0]
        return ids
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = str(state.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    return state.tokenizer.encode(prompt, add_special_tokens=False)
