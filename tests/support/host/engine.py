"""What differs between slime and vime: the names of the engine's options, and its requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import SimpleNamespace

_REQUIRED: Any = object()


class HostEngine(ABC):
    """What slime and vime have under the same names, each for its own engine."""

    package: ClassVar[str]  # the trainer's name
    name: ClassVar[str]  # the engine's, with which options begin that concern it
    path: ClassVar[str]  # of the endpoint that generates
    seed: ClassVar[str]
    session: ClassVar[tuple[str, str]]  # a router's policy, and the header that it reads
    speculative: ClassVar[str]  # the option that switches speculative decoding on
    abort_all: ClassVar[tuple[str, dict[str, Any]]]
    load_path: ClassVar[str]

    def option(self, args: SimpleNamespace, name: str, default: Any = _REQUIRED) -> Any:
        """One of the options that concern the engine, without its name."""
        name = f"{self.name}_{name}"
        return getattr(args, name) if default is _REQUIRED else getattr(args, name, default)

    def router(self, args: SimpleNamespace) -> str:
        return f"http://{self.option(args, 'router_ip')}:{self.option(args, 'router_port')}"

    def sampling_params(self, args: SimpleNamespace) -> dict[str, Any]:
        """Payload keys that only this engine has."""
        return {}

    @abstractmethod
    def payload(self, args: SimpleNamespace, params: dict[str, Any], ids: list[int], images: Any) -> dict[str, Any]:
        """A request that is not streamed; ``images`` are the text that they belong to, and their data."""

    @abstractmethod
    def read(self, reply: Any, decode: Any) -> dict[str, Any]:
        """The arguments of ``append_response_tokens`` that its reply gives."""

    @abstractmethod
    def busy(self, load: Any) -> bool:
        """Whether the reply of ``load_path`` reports requests."""


class _Sglang(HostEngine):
    package, name, path, seed = "slime", "sglang", "/generate", "sampling_seed"
    session = ("consistent_hashing", "X-SMG-Routing-Key")
    speculative = "sglang_speculative_algorithm"
    abort_all = ("/abort_request", {"abort_all": True})
    load_path = "/v1/loads?include=core"

    def sampling_params(self, args: SimpleNamespace) -> dict[str, Any]:
        return {"custom_params": {"return_top_p_token_ids": True}} if args.rollout_top_p != 1.0 else {}

    def payload(self, args: SimpleNamespace, params: dict[str, Any], ids: list[int], images: Any) -> dict[str, Any]:
        payload: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
        if args.use_rollout_routing_replay:
            payload["return_routed_experts"] = True
        return payload | ({"input_ids": ids} if images is None else {"text": images[0], "image_data": images[1]})

    def read(self, reply: Any, decode: Any) -> dict[str, Any]:
        pairs = reply["meta_info"].get("output_token_logprobs") or []
        return {
            "tokens": [token for _, token, _ in pairs],
            "log_probs": [logprob for logprob, _, _ in pairs],
            "meta_info": reply["meta_info"],
            "text": reply["text"],
        }

    def busy(self, load: Any) -> bool:
        return any(each["num_running_reqs"] + each["num_waiting_reqs"] for each in load["loads"])


class _Vllm(HostEngine):
    package, name, path, seed = "vime", "vllm", "/inference/v1/generate", "seed"
    session = ("consistent_hash", "x-session-id")
    speculative = "vllm_speculative_config"
    abort_all = ("/abort_requests", {})
    load_path = "/load"

    def payload(self, args: SimpleNamespace, params: dict[str, Any], ids: list[int], images: Any) -> dict[str, Any]:
        assert images is None, "the stand-in's own generation takes no images here"
        names = {"max_new_tokens": "max_tokens", "no_stop_trim": "include_stop_str_in_output"}
        renamed = {names.get(name, name): value for name, value in params.items() if value is not None}
        return {"model": args.hf_checkpoint, "token_ids": ids, "sampling_params": {**renamed, "logprobs": 1}}

    def read(self, reply: Any, decode: Any) -> dict[str, Any]:
        choice = reply["choices"][0]
        ids = choice["token_ids"]
        meta: Mapping[str, Any] = {"finish_reason": {"type": choice["finish_reason"]}, **reply["usage"]}
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return {"tokens": ids, "log_probs": logprobs, "meta_info": meta, "text": decode(ids, skip_special_tokens=True)}

    def busy(self, load: Any) -> bool:
        return bool(load["server_load"])


ENGINES: dict[str, HostEngine] = {engine.package: engine for engine in (_Sglang(), _Vllm())}
_current = ENGINES["slime"]


def current() -> HostEngine:
    """The engine of the installed trainer; slime's if none is."""
    return _current


def choose(package: str) -> None:
    """Make the stand-in that trainer."""
    global _current  # noqa: PLW0603  # there is one stand-in at a time
    _current = ENGINES[package]
