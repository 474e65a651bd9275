//! The fields of one vLLM event, before anything is checked. A missing key and null mean the same.

use crate::engine_error::ErrorFields;
use crate::field::{Field, List, RawMatched};
use crate::span::{RawStr, Span};
use crate::text::name;
use crate::vllm::api::Api;
use crate::vllm::keys::{ChoiceKey, EventKey};

/// One event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fields {
    pub is_object: bool,
    pub errors: ErrorFields,
    /// `request_id`, or `id` in completions.
    pub id: Field<RawStr>,
    pub output_mode: Field<RawStr>,
    /// In `/inference/v1/generate`.
    pub prompt_token_ids: Field<List>,
    pub versions: Versions,
    /// The number of choices.
    pub choices: Field<usize>,
    /// The first choice.
    pub choice: Choice,
    pub usage: Usage,
}

/// The weight versions, in the event or in its choice. Those in the choice count first.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Versions {
    pub weight_version: Field<Span>,
    pub weight_versions: Field<Span>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Choice {
    pub object: Field<()>,
    pub index: Field<u64>,
    pub finish: Field<RawStr>,
    /// `stop_reason`.
    pub matched: Option<RawMatched>,
    pub token_ids: Field<List>,
    /// In completions.
    pub prompt_token_ids: Field<List>,
    pub text: Field<RawStr>,
    pub logprobs: Logprobs,
    pub routed_experts: Field<RawStr>,
    pub sampling_mask: Field<Span>,
    pub versions: Versions,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Logprobs {
    pub object: Field<()>,
    /// `content`, or `token_logprobs` in completions.
    pub list: Field<List>,
    /// `tokens` in completions.
    pub tokens: Field<List>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub object: Field<()>,
    pub prompt_tokens: Field<u64>,
    pub completion_tokens: Field<u64>,
    /// `prompt_tokens_details`.
    pub details: Field<()>,
    pub cached_tokens: Field<u64>,
}

impl Fields {
    pub(super) fn is_text_mode(&self, data: &[u8]) -> bool {
        self.output_mode.get().is_some_and(|mode| *name(data, mode) == *b"text")
    }

    /// The prompt's tokens and their path.
    pub(super) fn prompt_ids(&self, api: Api) -> (&Field<List>, &'static str) {
        match api {
            Api::Generate => (&self.prompt_token_ids, EventKey::PromptTokenIds.path()),
            Api::Completions => (&self.choice.prompt_token_ids, ChoiceKey::PromptTokenIds.path()),
        }
    }

    /// Whether the event says how many tokens there are: it has token ids, even none, or the usage.
    pub(super) fn counts_tokens(&self) -> bool {
        self.choice.token_ids.has_value() || self.usage.completion_tokens.has_value()
    }

    pub(super) fn weight_version(&self) -> Option<Span> {
        self.choice.versions.weight_version.get().or(self.versions.weight_version.get())
    }

    /// Whether there is a value for `side.rs` to read.
    pub(super) fn has_side_data(&self) -> bool {
        let Choice { routed_experts, sampling_mask, versions, .. } = &self.choice;
        let values = [sampling_mask, &versions.weight_versions, &self.versions.weight_versions];
        routed_experts.has_value() || values.iter().any(|field| field.has_value())
    }

    /// The spans of weight versions and their path.
    pub(super) fn weight_versions(&self) -> Option<(Span, &'static str)> {
        let (inner, outer) = (&self.choice.versions.weight_versions, &self.versions.weight_versions);
        let inner = inner.get().map(|value| (value, ChoiceKey::WeightVersions.path()));
        inner.or(outer.get().map(|value| (value, EventKey::WeightVersions.path())))
    }
}
