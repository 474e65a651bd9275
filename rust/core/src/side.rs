//! Side data, for all dialects: routed experts, sampling masks (top-p sets), weight versions.

use crate::arrays::{metadata_error, next_tokens};
use crate::builder::GenerationBuilder;
use crate::error::EventError;
use crate::experts::CheckedExperts;
use crate::generation::{TopP, VersionSpan};
use crate::json::{Cursor, Peek};
use crate::span::Span;
use crate::text::{decode, label};

/// The number of tokens before and after an event. Side data must fit them.
#[derive(Clone, Copy)]
pub(crate) struct Progress {
    /// Tokens before the event.
    pub kept: usize,
    /// New tokens in the event.
    pub new: usize,
    pub is_last: bool,
}

impl Progress {
    pub(crate) fn total(self) -> usize {
        self.kept + self.new
    }
}

/// How an event's masks extend the masks so far.
pub(crate) enum Masks {
    None,
    Append(TopP),
    Replace(TopP),
}

/// Side data that has passed every check.
pub(crate) struct SideData {
    pub experts: Option<CheckedExperts>,
    pub masks: Masks,
    pub versions: Option<Vec<VersionSpan>>,
}

impl SideData {
    /// Apply that an event with `new` tokens has no side data.
    #[inline]
    pub(crate) fn apply_none(new: usize, builder: &mut GenerationBuilder) {
        let generation = &builder.generation;
        if generation.routed_experts.is_some() || generation.top_p.is_some() {
            Self { experts: None, masks: Masks::None, versions: None }.apply(new, builder);
        }
        builder.covers_top_p &= new == 0;
    }

    /// Apply the side data of an event with `new` tokens. Nothing here can fail.
    pub(crate) fn apply(self, new: usize, builder: &mut GenerationBuilder) {
        let generation = &mut builder.generation;
        match self.experts {
            Some(CheckedExperts { ids, rows, padded_rows }) => {
                (generation.routed_experts, generation.expert_rows) = (Some(ids), rows);
                generation.padded_rows = padded_rows;
            }
            // Earlier rows do not cover the new tokens: they would be misaligned.
            None if new > 0 => {
                (generation.routed_experts, generation.expert_rows, generation.padded_rows) = (None, None, 0);
            }
            None => {}
        }
        match self.masks {
            Masks::Replace(masks) => {
                builder.covers_top_p = true;
                generation.top_p = Some(masks);
            }
            Masks::Append(masks) if builder.covers_top_p => match &mut generation.top_p {
                None => generation.top_p = Some(masks),
                Some(kept) => {
                    let shift = kept.offsets.last().copied().unwrap_or_default();
                    kept.ids.extend(masks.ids);
                    kept.offsets.extend(masks.offsets[1..].iter().map(|offset| offset.saturating_add(shift)));
                }
            },
            Masks::Append(_) | Masks::None if new == 0 => {}
            Masks::Append(_) | Masks::None => {
                builder.covers_top_p = false;
                generation.top_p = None;
            }
        }
        if let Some(versions) = self.versions {
            generation.version_spans = versions;
        }
    }
}

/// Parse a list of ids for each token.
pub(crate) fn sampling_mask(data: &[u8], value: Span, path: &'static str) -> Result<TopP, EventError> {
    let mut cursor = Cursor::over(data, value);
    let mut masks = TopP { ids: Vec::new(), offsets: vec![0] };
    let wrong = |at| metadata_error(at, path, "expected a list of ids for each token");
    if cursor.peek() != Ok(Peek::Array) {
        return Err(wrong(value.start()));
    }
    let mut more = cursor.next_array();
    while more {
        if cursor.peek() != Ok(Peek::Array) {
            return Err(wrong(cursor.at));
        }
        let at = cursor.at;
        if cursor.next_array() {
            next_tokens(&mut cursor, 4, &mut masks.ids).map_err(|_| wrong(value.start()))?;
        }
        let end = i32::try_from(masks.ids.len()).map_err(|_| metadata_error(at, path, "more than 2147483647 ids"))?;
        masks.offsets.push(end);
        more = cursor.next_element().map_err(|_| wrong(value.start()))?;
    }
    if masks.ids.iter().any(|&id| id < 0) {
        return Err(metadata_error(value.start(), path, "an id is not an integer in 0 … 2147483647"));
    }
    Ok(masks)
}

/// Parse the spans of weight versions, which must cover all tokens.
pub(crate) fn versions(
    data: &[u8],
    value: Span,
    total: usize,
    path: &'static str,
) -> Result<Vec<VersionSpan>, EventError> {
    let wrong = |at| metadata_error(at, path, "expected a list of {version, start, end}");
    let mut cursor = Cursor::over(data, value);
    let mut spans = Vec::new();
    if cursor.peek() != Ok(Peek::Array) {
        return Err(wrong(value.start()));
    }
    let mut more = cursor.next_array();
    while more {
        let at = cursor.at;
        let span = version_span(data, &mut cursor).ok_or_else(|| wrong(at))?;
        let expected = spans.last().map_or(0, |last: &VersionSpan| last.end);
        if span.start > span.end {
            return Err(metadata_error(
                at,
                path,
                format!("a span starts at {} and ends before that, at {}", span.start, span.end),
            ));
        }
        if span.start < span.end {
            if span.start != expected {
                let message = format!("a span starts at {}, but the previous one ends at {expected}", span.start);
                return Err(metadata_error(at, path, message));
            }
            spans.push(span);
        }
        more = cursor.next_element().map_err(|_| wrong(value.start()))?;
    }
    let end = spans.last().map_or(0, |last| last.end);
    if end != total {
        return Err(metadata_error(
            value.start(),
            path,
            format!("the spans end at {end}, but there are {total} tokens"),
        ));
    }
    Ok(spans)
}

fn version_span(data: &[u8], cursor: &mut Cursor<'_>) -> Option<VersionSpan> {
    if cursor.peek().ok()? != Peek::Object {
        return None;
    }
    let (mut version, mut start, mut end) = (None, None, None);
    let mut key = cursor.next_object().ok()?;
    while let Some(raw) = key {
        let name = decode(data, raw);
        let peek = cursor.peek().ok()?;
        let mut ahead = cursor.clone();
        let value = cursor.skip_value(4).ok()?;
        let mut count = || {
            let number = (peek == Peek::Number).then(|| ahead.next_number().ok()).flatten()?;
            usize::try_from(number.as_integer(u64::from(u32::MAX))?).ok()
        };
        match name.as_str() {
            "version" => version = matches!(peek, Peek::String | Peek::Number).then(|| label(data, value)),
            "start" => start = count(),
            "end" => end = count(),
            _ => {}
        }
        key = cursor.next_member().ok()?;
    }
    Some(VersionSpan { version: Some(version?), start: start?, end: end? })
}

/// The label of the weight version. It is decoded only when it changes.
#[derive(Default)]
pub(crate) struct Version {
    raw: Vec<u8>,
    label: String,
}

impl Version {
    pub(crate) fn decode(&mut self, data: &[u8], span: Span) -> &str {
        let raw = span.of(data);
        if self.raw != raw {
            self.raw = raw.to_vec();
            self.label = label(data, span);
        }
        &self.label
    }
}
