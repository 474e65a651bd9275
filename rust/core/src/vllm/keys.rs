//! The keys of a vLLM event.

use crate::key_cache;

/// The keys that mean something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    RequestId,
    Id,
    OutputMode,
    Choices,
    Usage,
    Error,
    Object,
    Message,
    Detail,
    Code,
    Index,
    FinishReason,
    StopReason,
    TokenIds,
    Logprobs,
    Text,
    RoutedExperts,
    SamplingMask,
    WeightVersion,
    WeightVersions,
    PromptTokens,
    CompletionTokens,
    PromptTokensDetails,
    Other,
    /// No key: the object ends.
    End,
}

/// Where a key stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Event,
    Choice,
    Usage,
}

impl key_cache::Key for Key {
    type Level = Level;
    const END: Self = Self::End;

    fn of(level: Level, name: &[u8]) -> Self {
        match (level, name) {
            (Level::Event, b"request_id") => Self::RequestId,
            (Level::Event, b"id") => Self::Id,
            (Level::Event, b"output_mode") => Self::OutputMode,
            (Level::Event, b"choices") => Self::Choices,
            (Level::Event, b"usage") => Self::Usage,
            (Level::Event, b"error") => Self::Error,
            (Level::Event, b"object") => Self::Object,
            (Level::Event, b"message") => Self::Message,
            (Level::Event, b"detail") => Self::Detail,
            (Level::Event, b"code") => Self::Code,
            (Level::Choice, b"index") => Self::Index,
            (Level::Choice, b"finish_reason") => Self::FinishReason,
            (Level::Choice, b"stop_reason") => Self::StopReason,
            (Level::Choice, b"token_ids") => Self::TokenIds,
            (Level::Choice, b"logprobs") => Self::Logprobs,
            (Level::Choice, b"text") => Self::Text,
            (Level::Choice, b"routed_experts") => Self::RoutedExperts,
            (Level::Choice, b"sampling_mask") => Self::SamplingMask,
            (Level::Event | Level::Choice, b"weight_version") => Self::WeightVersion,
            (Level::Event | Level::Choice, b"weight_versions") => Self::WeightVersions,
            (Level::Usage, b"prompt_tokens") => Self::PromptTokens,
            (Level::Usage, b"completion_tokens") => Self::CompletionTokens,
            (Level::Usage, b"prompt_tokens_details") => Self::PromptTokensDetails,
            _ => Self::Other,
        }
    }
}
