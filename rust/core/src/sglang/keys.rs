//! The keys of an SGLang event.

use crate::key_cache;

/// The keys that mean something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Text,
    OutputIds,
    MetaInfo,
    Index,
    Error,
    Object,
    Message,
    Detail,
    Code,
    Pairs,
    PromptTokens,
    CachedTokens,
    RoutedExperts,
    TopPIds,
    TopPOffsets,
    TopPKeptIds,
    TopPKeptOffsets,
    Id,
    FinishReason,
    CompletionTokens,
    Length,
    WeightVersion,
    WeightVersions,
    RoutedExpertsDtype,
    SamplingMask,
    Other,
    /// No key: the object ends.
    End,
}

/// Where a key stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Top,
    MetaInfo,
}

impl key_cache::Key for Key {
    type Level = Level;
    const END: Self = Self::End;

    fn of(level: Level, name: &[u8]) -> Self {
        match level {
            Level::Top => match name {
                b"text" => Self::Text,
                b"output_ids" => Self::OutputIds,
                b"meta_info" => Self::MetaInfo,
                b"index" => Self::Index,
                b"error" => Self::Error,
                b"object" => Self::Object,
                b"message" => Self::Message,
                b"detail" => Self::Detail,
                b"code" => Self::Code,
                _ => Self::Other,
            },
            Level::MetaInfo => match name {
                b"output_token_logprobs" => Self::Pairs,
                b"prompt_tokens" => Self::PromptTokens,
                b"cached_tokens" => Self::CachedTokens,
                b"routed_experts" => Self::RoutedExperts,
                b"top_p_token_ids" => Self::TopPIds,
                b"top_p_token_offsets" => Self::TopPOffsets,
                b"top_p_kept_token_ids" => Self::TopPKeptIds,
                b"top_p_kept_token_offsets" => Self::TopPKeptOffsets,
                b"id" => Self::Id,
                b"finish_reason" => Self::FinishReason,
                b"completion_tokens" => Self::CompletionTokens,
                b"output_token_logprobs_length" => Self::Length,
                b"weight_version" => Self::WeightVersion,
                b"weight_versions" => Self::WeightVersions,
                b"routed_experts_dtype" => Self::RoutedExpertsDtype,
                b"output_token_sampling_mask" => Self::SamplingMask,
                _ => Self::Other,
            },
        }
    }
}
