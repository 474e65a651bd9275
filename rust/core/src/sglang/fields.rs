//! The fields of one SGLang event, before anything is checked.

use crate::engine_error::ErrorFields;
use crate::field::{Field, List, RawMatched};
use crate::generation::FinishReason;
use crate::span::{RawStr, Span};

/// The value of `finish_reason`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish {
    /// None: its type is missing or unknown.
    pub reason: Option<FinishReason>,
    pub matched: Option<RawMatched>,
    pub status: Field<i64>,
    pub message: Option<RawStr>,
}

/// One event.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub is_object: bool,
    pub text: Field<RawStr>,
    pub output_ids: Field<List>,
    pub prompt_token_ids: Field<List>,
    pub index: Field<u64>,
    pub errors: ErrorFields,
    pub meta_info: Field<()>,
    /// What is in `meta_info`.
    pub meta: MetaFields,
}

/// The fields of `meta_info`.
#[derive(Debug, Default)]
pub(super) struct MetaFields {
    pub id: Field<RawStr>,
    pub finish: Field<Finish>,
    pub prompt_tokens: Field<u64>,
    pub completion_tokens: Field<u64>,
    pub cached_tokens: Field<u64>,
    pub pairs: Field<List>,
    pub length: Field<u64>,
    pub weight_version: Field<Span>,
    pub weight_versions: Field<Span>,
    pub routed_experts: Field<RawStr>,
    pub routed_experts_dtype: Field<RawStr>,
    pub routed_experts_start: Field<u64>,
    pub top_p_ids: Field<Span>,
    pub top_p_offsets: Field<Span>,
    pub top_p_kept_ids: Field<Span>,
    pub top_p_kept_offsets: Field<Span>,
    pub sampling_mask: Field<Span>,
}

impl MetaFields {
    /// Whether there is a value for `side.rs` to read.
    pub(super) fn has_side_data(&self) -> bool {
        let Self { weight_versions, routed_experts, routed_experts_dtype, .. } = self;
        let Self { top_p_ids, top_p_offsets, top_p_kept_ids, top_p_kept_offsets, sampling_mask, .. } = self;
        let values = [weight_versions, top_p_ids, top_p_offsets, top_p_kept_ids, top_p_kept_offsets, sampling_mask];
        values.iter().any(|field| field.has_value()) || routed_experts.has_value() || routed_experts_dtype.has_value()
    }
}
