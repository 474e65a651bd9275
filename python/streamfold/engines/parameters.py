"""Names of sampling parameters that each engine knows, in any of its supported releases."""

from __future__ import annotations

from typing import Final

__all__ = ["SGLANG", "VLLM", "VLLM_COMPLETIONS"]

#: SGLang 0.5.11 to 0.5.23, ``/generate``.
SGLANG: Final = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "beam_width"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "sampling_seed"),
        *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim"),
        *("json_schema", "regex", "ebnf", "structural_tag"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "custom_params"),
    )
)

_BOTH: Final = frozenset(
    (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "watermarking"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "repetition_detection", "logit_bias"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "bad_words", "allowed_token_ids"),
        *("logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs", "thinking_token_budget"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "routed_experts_prompt_start"),
        *("truncate_prompt_tokens", "custom_params"),
    )
)

#: vLLM 0.20 to 0.33, ``/inference/v1/generate``.
VLLM: Final = _BOTH | frozenset(
    (
        *("detokenize", "flat_logprobs", "output_kind", "extra_args", "skip_reading_prefix_cache"),
        *("prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids", "skip_clone"),
    )
)

#: vLLM 0.20 to 0.33, ``/v1/completions``, where they stand beside the other keys of the request.
VLLM_COMPLETIONS: Final = _BOTH | frozenset(
    (
        *(
            "use_beam_search",
            "length_penalty",
            "truncation_side",
            "add_special_tokens",
            "response_format",
            "vllm_xargs",
        ),
        *("model", "user", "echo", "suffix", "priority", "cache_salt", "session_id", "return_tokens_as_token_ids"),
        *("kv_transfer_params", "ec_transfer_params", "prompt_embeds"),
    )
)
