//! What one SGLang event holds, whatever it is.

use crate::engine_error::ErrorKeys;
use crate::field::{Field, List, RawMatched};
use crate::generation::FinishReason;
use crate::span::{RawStr, Span};

/// What a finish reason says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish {
    /// None: its type is missing or unknown.
    pub reason: Option<FinishReason>,
    pub matched: Option<RawMatched>,
    pub status: Field<i64>,
    pub message: Option<RawStr>,
}

/// One event.
#[derive(Debug)]
pub(super) struct Fields {
    pub is_object: bool,
    pub text: Field<RawStr>,
    pub output_ids: Field<List>,
    pub index: Field<u64>,
    pub meta_info: Field<()>,
    pub errors: ErrorKeys,

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
    pub top_p_ids: Field<Span>,
    pub top_p_offsets: Field<Span>,
    pub top_p_kept_ids: Field<Span>,
    pub top_p_kept_offsets: Field<Span>,
    pub sampling_mask: Field<Span>,
}

impl Fields {
    pub(super) const EMPTY: Self = Self {
        is_object: false,
        text: Field::ABSENT,
        output_ids: Field::ABSENT,
        index: Field::ABSENT,
        meta_info: Field::ABSENT,
        errors: ErrorKeys::ABSENT,
        id: Field::ABSENT,
        finish: Field::ABSENT,
        prompt_tokens: Field::ABSENT,
        completion_tokens: Field::ABSENT,
        cached_tokens: Field::ABSENT,
        pairs: Field::ABSENT,
        length: Field::ABSENT,
        weight_version: Field::ABSENT,
        weight_versions: Field::ABSENT,
        routed_experts: Field::ABSENT,
        routed_experts_dtype: Field::ABSENT,
        top_p_ids: Field::ABSENT,
        top_p_offsets: Field::ABSENT,
        top_p_kept_ids: Field::ABSENT,
        top_p_kept_offsets: Field::ABSENT,
        sampling_mask: Field::ABSENT,
    };

    /// Forget what a `meta_info` held: a second one replaces it.
    pub(super) fn clear_meta(&mut self) {
        let top = std::mem::replace(self, Self::EMPTY);
        *self = Self {
            is_object: top.is_object,
            text: top.text,
            output_ids: top.output_ids,
            index: top.index,
            errors: top.errors,
            ..Self::EMPTY
        };
    }
}
