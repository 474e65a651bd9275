//! What one SGLang event holds, whatever it is.

use crate::generation::FinishReason;
use crate::json::{RawStr, Span};
use crate::sglang::staged::List;

/// What stands under a key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<T> {
    Absent,
    Null,
    /// Of another type than it should be, or out of range.
    Wrong,
    Is(T),
}

/// A key's value and its place in the event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<T> {
    place: Span,
    pub value: Value<T>,
}

impl<T: Copy> Field<T> {
    pub(super) const ABSENT: Self = Self { place: Span::NOWHERE, value: Value::Absent };

    #[inline]
    pub(super) fn new(at: usize, value: Value<T>) -> Self {
        Self { place: Span::new(at, at), value }
    }

    pub(super) fn at(&self) -> usize {
        self.place.start()
    }

    #[inline]
    pub(super) fn get(&self) -> Option<T> {
        match self.value {
            Value::Is(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn is_wrong(&self) -> bool {
        matches!(self.value, Value::Wrong)
    }
}

/// What a finish reason says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish {
    /// None: its type is missing or unknown.
    pub reason: Option<FinishReason>,
    pub matched: Option<RawMatched>,
    pub status: Field<i64>,
    pub message: Option<RawStr>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum RawMatched {
    Token(i64),
    Text(RawStr),
}

/// One event.
#[derive(Debug)]
pub(super) struct Fields {
    pub is_object: bool,
    pub text: Field<RawStr>,
    pub output_ids: Field<List>,
    pub index: Field<u64>,
    pub meta_info: Field<()>,
    pub error: Field<Span>,
    pub object: Field<RawStr>,
    pub message: Field<Span>,
    pub detail: Field<Span>,
    pub code: Field<Span>,

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
        error: Field::ABSENT,
        object: Field::ABSENT,
        message: Field::ABSENT,
        detail: Field::ABSENT,
        code: Field::ABSENT,
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
            error: top.error,
            object: top.object,
            message: top.message,
            detail: top.detail,
            code: top.code,
            ..Self::EMPTY
        };
    }
}
