//! The keys of an SGLang event.
//!
//! To read another key: add it here, give it a field in `fields.rs`, then follow the compiler.

use crate::key_table::keys;

keys! {
    /// The keys at the top of an event.
    Event(EventKey) at "" {
        Text = "text": Field,
        OutputIds = "output_ids": Field,
        MetaInfo = "meta_info": Field,
        PromptTokenIds = "prompt_token_ids": Field,
        Index = "index": Meta,
        Error = "error": Meta,
        Object = "object": Meta,
        Message = "message": Meta,
        Detail = "detail": Meta,
        Code = "code": Meta,
    }

    /// The keys of `meta_info`.
    Meta(MetaKey) at "meta_info." {
        Id = "id": RepeatedMeta,
        FinishReason = "finish_reason": RepeatedMeta,
        PromptTokens = "prompt_tokens": NeededField,
        CompletionTokens = "completion_tokens": Meta,
        CachedTokens = "cached_tokens": RepeatedField,
        /// The pairs of logprob and token id. If logprobs were not requested, it is `Meta` and not parsed.
        Pairs = "output_token_logprobs": Field,
        Length = "output_token_logprobs_length": Meta,
        WeightVersion = "weight_version": NeededMeta,
        WeightVersions = "weight_versions": Meta,
        RoutedExperts = "routed_experts": Field,
        RoutedExpertsDtype = "routed_experts_dtype": Meta,
        RoutedExpertsStart = "routed_experts_start_len": Meta,
        TopPIds = "top_p_token_ids": Field,
        TopPOffsets = "top_p_token_offsets": Field,
        TopPKeptIds = "top_p_kept_token_ids": Field,
        TopPKeptOffsets = "top_p_kept_token_offsets": Field,
        SamplingMask = "output_token_sampling_mask": Meta,
    }
}
