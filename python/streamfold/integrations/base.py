"""``Integration``: where a trainer (slime, vime, miles) has its modules and options, and how it differs from others.

:mod:`streamfold.slime`, :mod:`streamfold.vime` and :mod:`streamfold.miles` each define one :class:`Integration`;
everything else in this folder works for any of them.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sized
    from contextlib import AbstractContextManager
    from types import ModuleType

    from streamfold._core import Generation
    from streamfold.client.abort_signal import AbortSignal
    from streamfold.integrations.clients import ClientHandle
    from streamfold.integrations.settings import Args, Settings
    from streamfold.samples.options import Extra

__all__ = ["Integration", "SampleRequest", "TrainerSample", "has_items", "router_url"]

TrainerSample: TypeAlias = Any  # slime.utils.types.Sample, or another trainer's; its fields differ between releases

_logger = logging.getLogger("streamfold")

# What score centering keeps beside the tokens of a response.
_SCORE_FIELDS: Final = ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_top_p_log_probs")


def router_url(host: str, port: int) -> str:
    """The URL of a router; a bare IPv6 address gets its brackets."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def has_items(inputs: Sized | None) -> bool:
    """Whether a sample has any images, or other inputs of one kind; an array of them has no truth value."""
    return inputs is not None and len(inputs) > 0


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One sample to generate, and what its HTTP requests need.

    Attributes:
        args: the trainer's options.
        sample: the trainer's; its ``tokens`` hold at least the prompt.
        settings: ours, read from ``args``.
        handle: the client to use.
        headers: of each request.
        abort: set while the trainer is aborting; then no request may leave.
    """

    args: Args
    sample: TrainerSample
    settings: Settings
    handle: ClientHandle
    headers: Mapping[str, str]
    abort: AbortSignal


class Integration(ABC):
    """A trainer: where its modules, options and functions are, and what it does differently. Has no state.

    Attributes:
        package: the trainer's package, and the name of our module for it.
        engine: the inference engine. The trainer's options that concern it start with that name.
        session_policy: the router policy under which ``session_header`` sends all calls of a sample to one worker.
        session_header: the header that carries ``sample.session_id`` then.
        seed_param: the engine's sampling parameter for a seed.
        sample_method: the method by which its samples are written: the first release that has it is the oldest that
            works.
        oldest_release: that release, for the error that an older one gets.
        may_abort_without_finish_reason: whether a stream that the trainer aborted may end without a finish reason.
    """

    package: ClassVar[str]
    engine: ClassVar[Literal["sglang", "vllm"]]
    session_policy: ClassVar[str]
    session_header: ClassVar[str]
    seed_param: ClassVar[str]
    sample_method: ClassVar[str] = "append_response_tokens"
    oldest_release: ClassVar[str]
    may_abort_without_finish_reason: ClassVar[bool] = False

    # Modules and functions of the trainer.

    def module(self, name: str) -> ModuleType:
        """Import one of its modules. Call this inside functions only: the trainer need not be installed."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def rollout_module(self) -> Any:  # noqa: ANN401  # a module, whose names a type checker cannot know
        """The module with its ``GenerateState`` and ``eval_rollout``, such as ``slime.rollout.sglang_rollout``."""
        return self.module(f"rollout.{self.engine}_rollout")

    def find(self, module: str, name: str) -> Any:  # noqa: ANN401
        """A name that not every release has; None if this one does not."""
        try:
            return getattr(self.module(module), name, None)
        except ModuleNotFoundError:
            return None

    def load_function(self, path: str) -> Callable[..., Any]:
        """The function at a dotted path, found by the trainer's own ``load_function`` if it has one."""
        load = self.find("utils.misc", "load_function") or _function_at
        function: Callable[..., Any] = load(path)
        return function

    @property
    def generate_path(self) -> str:
        """The dotted path of our generate function for it."""
        return f"streamfold.{self.package}.generate_streaming"

    # Its options.

    def engine_option(self, args: Args, name: str, *default: Any) -> Any:  # noqa: ANN401
        """An option that starts with the engine's name, which ``name`` leaves out."""
        return getattr(args, f"{self.engine}_{name}", *default)

    def model_router(self, args: Args, sample: TrainerSample, settings: Settings) -> str | None:
        """The URL of the router of the model that the sample or ``streamfold_model`` names; None: the default router.

        ``metadata["model_name"]`` may be the dataset's own: where no router has that name, the sample names no model,
        as for the trainer's ``get_model_url``.

        Raises:
            ValueError: no router is known for ``streamfold_model``.
        """
        routers = self.engine_option(args, "model_routers", None)
        if not routers:
            return None
        name = (getattr(sample, "metadata", None) or {}).get("model_name")
        if isinstance(name, str) and name in routers:
            return router_url(*routers[name])
        if not settings.model:
            return None
        if settings.model not in routers:
            known = ", ".join(routers)
            raise ValueError(f"no router for the model {settings.model!r}; {self.engine}_model_routers has {known}")
        return router_url(*routers[settings.model])

    # What it does differently.

    def refuse_leases(self, args: Args, name: str) -> None:
        """Raise ValueError if workers lease their prompts, in which our function or class ``name`` takes no part."""
        if getattr(args, "rollout_data_transport", None) == "straw":
            raise ValueError(
                'with rollout_data_transport="straw" worker processes lease their prompts, and '
                f"streamfold.{self.package}.{name} takes no part in leases: use "
                f"{self.package}'s own rollout function and data source, with "
                f"--custom-generate-function-path {self.generate_path}, or --rollout-data-transport object-store"
            )

    def check(self, args: Args, sample: TrainerSample, sampling_params: Mapping[str, Any], *, evaluation: bool) -> None:
        """Raise ValueError for what cannot succeed, before any request leaves."""
        del sampling_params, evaluation
        if getattr(args, "use_score_centering", False):
            raise ValueError(
                "use_score_centering needs scores that streaming does not carry: switch it off, or generate with "
                f"{self.package}'s own function"
            )
        for name in _SCORE_FIELDS:
            if sample.response_length and getattr(sample, name, None) is not None:
                raise ValueError(
                    f"the response has {name}, which streaming does not carry: continue it with {self.package}'s own "
                    "function"
                )
        if getattr(args, "ci_test", False) and not isinstance(sample.prompt, str):
            raise ValueError(f"with ci_test the prompt must be a str, not {type(sample.prompt).__name__}")
        if not hasattr(sample, self.sample_method):
            raise ValueError(
                f"samples of this {self.package} have no {self.sample_method}: {self.oldest_release} is needed"
            )

    def prompt_ids(self, sample: TrainerSample, state: Any) -> list[int]:  # noqa: ANN401  # the trainer's
        """The prompt's ids as the trainer makes them, or the sample's tokens if it has some."""
        prepare = self.rollout_module._prepare_prompt_ids  # noqa: SLF001  # the trainer's
        ids: list[int] = prepare(sample, getattr(state, "tokenizer", None), getattr(state, "processor", None))
        return ids

    def headers(self, args: Args, sample: TrainerSample) -> dict[str, str]:
        """Headers that send all calls of a sample to one worker."""
        session = getattr(sample, "session_id", None)
        if session and getattr(args, "router_policy", None) == self.session_policy:
            return {self.session_header: session}
        return {}

    def experts_dtype(self, num_experts: int | None) -> Literal["int32", "uint8"]:
        """The dtype to request routed experts in. If the response names one, that one counts."""
        del num_experts
        return "int32"

    def sampling_params(
        self, args: Args, sample: TrainerSample, given: Mapping[str, Any], *, evaluation: bool
    ) -> dict[str, Any]:
        """A copy of the trainer's sampling parameters as :func:`~streamfold.complete` takes them."""
        del args, sample, evaluation
        return dict(given)

    @abstractmethod
    async def extra_payload(self, request: SampleRequest) -> Extra | None:
        """Payload keys besides ids and sampling parameters, such as images.

        Returns:
            None: the trainer started to abort before they were known.
        """

    @abstractmethod
    def trace_meta(self, generation: Generation) -> dict[str, Any]:
        """A generation as the trainer's ``build_{engine}_meta_trace_attrs`` takes it."""

    # Its trace.

    def span(self, target: TrainerSample, name: str, **attrs: Any) -> AbstractContextManager[Any]:  # noqa: ANN401
        """A span on the trainer's trace of a sample, or of a list of them; a null context without traces."""
        trace_span = self._trace_helper("trace_span")
        if trace_span is None:
            return contextlib.nullcontext()
        span: AbstractContextManager[Any] = trace_span(target, name, attrs=attrs)
        return span

    def update_span(self, span: object, generation: Generation) -> None:
        """Add the attributes of a finished call to its span."""
        build = self._trace_helper(f"build_{self.engine}_meta_trace_attrs")
        update = getattr(span, "update", None)
        if build is None or update is None or generation.finish_reason is None:
            return
        try:
            update(build(self.trace_meta(generation)))
        except Exception:  # a trace is not worth a sample
            _logger.exception("the attributes of a call could not be added to its %s span", self.package)

    def _trace_helper(self, name: str) -> Any:  # noqa: ANN401
        """One of its helpers for spans; newer and older releases have them in different modules."""
        found = (self.find(module, name) for module in ("observability.trace_utils", "utils.trace_utils"))
        return next((helper for helper in found if helper is not None), None)


def _function_at(path: str) -> Any:  # noqa: ANN401
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
