//! Side data, for all dialects: routed experts, sampling masks (top-p sets), weight versions.

use crate::arrays::{metadata_error, next_tokens};
use crate::builder::GenerationBuilder;
use crate::error::EventError;
use crate::generation::{RoutedExperts, TopP, VersionSpan};
use crate::json::{Cursor, Peek};
use crate::options::Options;
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
    /// The experts and the number of rows, if the shape is known.
    pub experts: Option<(RoutedExperts, Option<usize>)>,
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
            Some((experts, rows)) => (generation.routed_experts, generation.expert_rows) = (Some(experts), rows),
            // Earlier rows do not cover the new tokens: they would be misaligned.
            None if new > 0 => (generation.routed_experts, generation.expert_rows) = (None, None),
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

/// The required shape of routed experts.
pub(crate) struct ExpertShape {
    pub rows: usize,
    /// The number of ids in all rows.
    pub numbers: usize,
    /// How the number of rows is computed, for a message.
    pub why: String,
}

impl ExpertShape {
    /// The required shape after `total` tokens; None if the caller gave no `experts`.
    pub(crate) fn of(
        options: &Options,
        prompt_tokens: Option<u64>,
        total: usize,
        at: usize,
        path: &'static str,
    ) -> Result<Option<Self>, EventError> {
        let Some(experts) = options.experts else { return Ok(None) };
        let Some(prompt) = options.prompt_len.or(prompt_tokens) else {
            return Err(metadata_error(at, path, "the number of prompt tokens is not known; pass prompt_len"));
        };
        let prompt = usize::try_from(prompt).unwrap_or(usize::MAX);
        let start = usize::try_from(options.experts_start).unwrap_or(usize::MAX);
        let rows = prompt.saturating_add(total).saturating_sub(1).saturating_sub(start);
        let why = format!(
            "{rows} rows ({prompt} of the prompt + {total} tokens - 1 - {start}) of {} layers and top {}",
            experts.num_layers, experts.top_k
        );
        let numbers = rows.checked_mul(experts.num_layers).and_then(|numbers| numbers.checked_mul(experts.top_k));
        let numbers = numbers.ok_or_else(|| metadata_error(at, path, format!("{why}: too many")))?;
        Ok(Some(Self { rows, numbers, why }))
    }
}

/// The range of expert ids: they are less than the number of experts, and -1 marks a row that the engine padded.
pub(crate) struct ExpertRange {
    num_experts: Option<u32>,
    /// The first id that is outside.
    outside: Option<i32>,
}

impl ExpertRange {
    pub(crate) fn new(num_experts: Option<u32>) -> Self {
        Self { num_experts, outside: None }
    }

    /// Look at the next ids.
    pub(crate) fn add<T: Copy + Into<i32>>(&mut self, ids: &[T]) {
        let limit = self.num_experts.unwrap_or(1 << 31);
        let is_outside = |id: i32| id.wrapping_add(1).cast_unsigned() > limit;
        // A block at a time, without a branch for each id.
        let mut blocks = ids.chunks(1024);
        let found = |block: &&[T]| block.iter().fold(false, |found, &id| found | is_outside(id.into()));
        if let (None, Some(block)) = (self.outside, blocks.find(found)) {
            self.outside = block.iter().map(|&id| id.into()).find(|&id| is_outside(id));
        }
    }

    /// No id was outside.
    pub(crate) fn check(&self, at: usize, path: &'static str) -> Result<(), EventError> {
        let Some(id) = self.outside else { return Ok(()) };
        let limit = self
            .num_experts
            .map_or_else(|| "ids must be at least -1".to_owned(), |limit| format!("there are {limit} experts"));
        Err(metadata_error(at, path, format!("found expert {id}, but {limit}; check the dtype of Experts")))
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
    Some(VersionSpan { version: version?, start: start?, end: end? })
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
