//! What one vLLM event holds, whatever it is. A key that is missing and one that is null mean the same.

use crate::engine_error::ErrorKeys;
use crate::field::{Field, List, RawMatched};
use crate::span::{RawStr, Span};
use crate::text::name;

/// One event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields {
    pub is_object: bool,
    pub errors: ErrorKeys,
    /// `request_id`, or `id` in completions.
    pub id: Field<RawStr>,
    pub output_mode: Field<RawStr>,
    pub versions: Versions,
    /// How many there are.
    pub choices: Field<usize>,
    /// The first of them.
    pub choice: Choice,
    pub usage: Usage,
}

/// Told by the event, or by its choice, which comes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Versions {
    pub weight_version: Field<Span>,
    pub weight_versions: Field<Span>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub object: Field<()>,
    pub index: Field<u64>,
    pub finish: Field<RawStr>,
    /// `stop_reason`.
    pub matched: Option<RawMatched>,
    pub token_ids: Field<List>,
    pub text: Field<RawStr>,
    pub logprobs: Logprobs,
    pub routed_experts: Field<RawStr>,
    pub sampling_mask: Field<Span>,
    pub versions: Versions,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Logprobs {
    pub object: Field<()>,
    /// `content`, or `token_logprobs` in completions.
    pub list: Field<List>,
    /// `tokens` in completions.
    pub tokens: Field<List>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub object: Field<()>,
    pub prompt_tokens: Field<u64>,
    pub completion_tokens: Field<u64>,
    /// `prompt_tokens_details`.
    pub details: Field<()>,
    pub cached_tokens: Field<u64>,
}

impl Fields {
    pub(super) const EMPTY: Self = Self {
        is_object: false,
        errors: ErrorKeys::ABSENT,
        id: Field::ABSENT,
        output_mode: Field::ABSENT,
        versions: Versions::ABSENT,
        choices: Field::ABSENT,
        choice: Choice::EMPTY,
        usage: Usage::EMPTY,
    };

    pub(super) fn is_text_mode(&self, data: &[u8]) -> bool {
        self.output_mode.get().is_some_and(|mode| *name(data, mode) == *b"text")
    }

    pub(super) fn weight_version(&self) -> Option<Span> {
        self.choice.versions.weight_version.get().or(self.versions.weight_version.get())
    }

    /// With their path.
    pub(super) fn weight_versions(&self) -> Option<(Span, &'static str)> {
        let (inner, outer) = (&self.choice.versions.weight_versions, &self.versions.weight_versions);
        let inner = inner.get().map(|value| (value, "choices[0].weight_versions"));
        inner.or(outer.get().map(|value| (value, "weight_versions")))
    }
}

impl Versions {
    pub(super) const ABSENT: Self = Self { weight_version: Field::ABSENT, weight_versions: Field::ABSENT };
}

impl Choice {
    pub(super) const EMPTY: Self = Self {
        object: Field::ABSENT,
        index: Field::ABSENT,
        finish: Field::ABSENT,
        matched: None,
        token_ids: Field::ABSENT,
        text: Field::ABSENT,
        logprobs: Logprobs::ABSENT,
        routed_experts: Field::ABSENT,
        sampling_mask: Field::ABSENT,
        versions: Versions::ABSENT,
    };
}

impl Logprobs {
    pub(super) const ABSENT: Self = Self { object: Field::ABSENT, list: Field::ABSENT, tokens: Field::ABSENT };
}

impl Usage {
    pub(super) const EMPTY: Self = Self {
        object: Field::ABSENT,
        prompt_tokens: Field::ABSENT,
        completion_tokens: Field::ABSENT,
        details: Field::ABSENT,
        cached_tokens: Field::ABSENT,
    };
}
