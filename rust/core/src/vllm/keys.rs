//! The keys of a vLLM event.
//!
//! To read another key: add it here, give it a field in `fields.rs`, then follow the compiler.

use crate::key_table::keys;

keys! {
    /// The keys at the top of an event.
    Event(EventKey) at "" {
        /// The request's id in `/inference/v1/generate`; in completions it is read as `Other`.
        RequestId = "request_id": RepeatedMeta,
        /// The request's id in completions; otherwise it is read as `Other`.
        Id = "id": RepeatedMeta,
        OutputMode = "output_mode": NeededMeta,
        Choices = "choices": Field,
        /// In `/inference/v1/generate`; in completions it is skipped.
        PromptTokenIds = "prompt_token_ids": Field,
        Usage = "usage": Field,
        Error = "error": Meta,
        Object = "object": Meta,
        Message = "message": Meta,
        Detail = "detail": Meta,
        Code = "code": Meta,
        WeightVersion = "weight_version": NeededMeta,
        WeightVersions = "weight_versions": NullField,
    }

    /// The keys of the first choice.
    Choice(ChoiceKey) at "choices[0]." {
        Index = "index": RepeatedMeta,
        FinishReason = "finish_reason": RepeatedMeta,
        StopReason = "stop_reason": RepeatedMeta,
        TokenIds = "token_ids": Field,
        /// In completions; in `/inference/v1/generate` it is skipped.
        PromptTokenIds = "prompt_token_ids": Field,
        Logprobs = "logprobs": Field,
        Text = "text": Field,
        RoutedExperts = "routed_experts": NullField,
        SamplingMask = "sampling_mask": NullField,
        WeightVersion = "weight_version": NeededMeta,
        WeightVersions = "weight_versions": NullField,
    }

    /// The keys of `usage`.
    Usage(UsageKey) at "usage." {
        PromptTokens = "prompt_tokens": NeededField,
        CompletionTokens = "completion_tokens": Meta,
        PromptTokensDetails = "prompt_tokens_details": RepeatedMeta,
    }
}
