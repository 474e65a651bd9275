"""SGLang: requests to its native ``/generate``, aborts, and the number of running and waiting requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from streamfold.engines.base import EngineSpec, asks_top_p, check_finite, read_json, with_extra
from streamfold.engines.parameters import SGLANG
from streamfold.errors import EngineError, quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold.engines.base import Ids, Post, RequestOptions

__all__ = ["Sglang"]
_BESIDE_PROMPT: Final = frozenset(  # keys of a request that route it, or say what it is to return
    {
        "custom_labels", "custom_logit_processor", "data_parallel_rank", "extra_key", "log_metrics",
        "logprob_start_len", "lora_path", "no_logs", "priority", "routed_dp_rank", "routed_experts_dtype",
        "routed_experts_start_len", "routing_key", "token_ids_logprob", "top_logprobs_num",
    }
)  # fmt: skip


class Sglang(EngineSpec):
    """SGLang's native ``/generate``, 0.5.11 and newer, directly or behind a router."""

    name = "sglang"
    dialect = "sglang"  # the parser detects cumulative or incremental streams
    path = "/generate"
    rid_key = "rid"
    session_header = "X-SMG-Routing-Key"
    rank_name = "routed_dp_rank"
    loads: ClassVar[tuple[str, ...]] = ("/v1/loads?include=core",)
    known_params: ClassVar[frozenset[str]] = SGLANG
    length_before_stop = True
    repeats_text = True
    ignores_given_ends = True
    image_key: ClassVar[str | None] = "image_data"
    side_data_needs: ClassVar[Mapping[str, str]] = {
        "routed_experts": "start the engine with --enable-return-routed-experts. A router may drop the keys of the "
        "request that ask for them (sglang-router 0.3.2 drops return_routed_experts, routed_experts_dtype and "
        "routed_experts_start_len): send to the engine, or use a router that keeps them",
        "top_p": "custom_params with return_top_p_token_ids needs slime's patch of SGLang; an unpatched one (0.5.16 or "
        "newer, such as 0.5.23) is asked by the request's key return_sampling_mask. A router may drop either of them "
        "(sglang-router 0.3.2 does): send to the engine, or use a router that keeps them",
        "indexer_topk": "start the engine with --enable-return-indexer-topk. A router may drop return_indexer_topk: "
        "send to the engine, or use a router that keeps it",
        "prompt_token_ids": "SGLang 0.5.13 or newer sends them. A router may drop return_prompt_token_ids: send to the "
        "engine, or use a router that keeps it",
    }

    def payload(
        self, input_ids: Ids | None, sampling_params: Mapping[str, Any], asked: RequestOptions
    ) -> dict[str, Any]:
        """Build the payload of ``/generate``."""
        params = check_finite(sampling_params)
        if asked.top_p:
            params["custom_params"] = {**(params.get("custom_params") or {}), "return_top_p_token_ids": True}
        payload: dict[str, Any] = {"rid": asked.rid}
        if input_ids is not None:
            payload["input_ids"] = input_ids
        else:
            _check_prompt(asked.extra or {})
        payload |= {"sampling_params": params, "stream": True, "return_logprob": asked.logprobs}
        if asked.prompt_token_ids:
            payload["return_prompt_token_ids"] = True
        if asked.experts is not None:
            payload["return_routed_experts"] = True
            if asked.experts.dtype != "int32":
                payload["routed_experts_dtype"] = asked.experts.dtype
            if asked.experts_start:
                payload["routed_experts_start_len"] = asked.experts_start
        return with_extra(payload, asked.extra)

    def to_rank(self, dp_rank: int | None) -> tuple[dict[str, str], dict[str, Any]]:
        """A payload key (0.5.10 and newer)."""
        return {}, {} if dp_rank is None else {self.rank_name: dp_rank}

    def hint(self, status: int) -> str:
        """For a 404: check the path, or let ``engine="auto"`` detect the server."""
        return f"does the server have {self.path}? engine='auto' detects the engine" if status == 404 else ""

    def asks_side_data(self, payload: Mapping[str, Any]) -> bool:
        """Whether anything was requested that also an aborted stream sends in its terminal event alone."""
        keys = ("return_routed_experts", "return_indexer_topk")
        return asks_top_p(payload["sampling_params"]) or any(payload.get(key) for key in keys)

    def aborts(self, rids: Sequence[str]) -> Sequence[tuple[str, Sequence[dict[str, Any]]]]:
        """One POST each: the scheduler matches ids by prefix, but gets only those that are some live request's own."""
        return [("/abort_request", [{"rid": rid} for rid in rids])]

    def aborts_all(self) -> Sequence[Post]:
        """One POST."""
        return [("/abort_request", {"abort_all": True})]

    def read_load(self, reply: bytes) -> int:
        """Sum over the data-parallel ranks."""
        return sum(_requests(load) for load in self._ranks(reply))

    def read_waiting(self, reply: bytes) -> int:
        """Sum over the data-parallel ranks."""
        loads = [load for load in self._ranks(reply) if isinstance(load, dict)]
        counts = [load.get("num_waiting_reqs") for load in loads]
        return sum(count for count in counts if isinstance(count, int))

    @staticmethod
    def _ranks(reply: bytes) -> list[Any]:
        report = read_json(reply)
        loads = report.get("loads", [report]) if isinstance(report, dict) else report
        if not isinstance(loads, list):
            raise EngineError(f"the engine's load is of an unknown shape: {quote(reply)}")
        return loads


def _requests(load: object) -> int:
    """Requests of one rank: the total if it is reported, otherwise running plus waiting ones."""
    if isinstance(load, dict):
        for keys in (("num_total_reqs",), ("num_reqs",), ("num_running_reqs", "num_waiting_reqs")):
            counts = [load.get(key) for key in keys]
            if all(isinstance(count, int) for count in counts):
                return sum(cast("list[int]", counts))
    raise EngineError(f"the engine's load is of an unknown shape: {repr(load)[:200]}")


def _check_prompt(extra: Mapping[str, Any]) -> None:
    """Raise ValueError if a request without ids has nothing else that may be a prompt."""
    if all(_holds_no_prompt(str(key)) or value is None for key, value in extra.items()):
        raise ValueError("the request has no prompt: pass input_ids, or text (or input_ids, input_embeds) in extra")


def _holds_no_prompt(key: str) -> bool:
    """Whether a key of a request is known to say something else than the prompt. Any other may hold one."""
    return key in _BESIDE_PROMPT or key.startswith(("return_", "bootstrap_"))
