//! What rides beside the tokens: routed experts, sampling masks, weight versions.

use crate::arrays::{base64_array, damaged, int32_array, next_tokens};
use crate::error::Flaw;
use crate::generation::{Generation, Growing, RoutedExperts, TopP, VersionSpan};
use crate::json::{Cursor, Peek, RawStr, Span};
use crate::parser::{Dtype, Options};
use crate::sglang::decode;
use crate::sglang::fields::{Fields, Value};
use crate::text::unescape;

const EXPERTS: &str = "meta_info.routed_experts";
const DTYPE: &str = "meta_info.routed_experts_dtype";
const TOP_P_IDS: &str = "meta_info.top_p_token_ids";
const TOP_P_OFFSETS: &str = "meta_info.top_p_token_offsets";
const MASK: &str = "meta_info.output_token_sampling_mask";
const VERSIONS: &str = "meta_info.weight_versions";

/// The tokens that side data must fit.
#[derive(Clone, Copy)]
pub(super) struct Arrivals {
    /// Tokens before the event.
    pub kept: usize,
    /// Tokens that it brings.
    pub new: usize,
    /// Elements in its list.
    pub len: usize,
    pub is_last: bool,
}

impl Arrivals {
    fn total(self) -> usize {
        self.kept + self.new
    }
}

/// How masks extend those before them.
enum Masks {
    None,
    Append(TopP),
    Replace(TopP),
}

/// Side data that has passed every check.
pub(super) struct SideData {
    experts: Option<(RoutedExperts, Option<usize>)>,
    masks: Masks,
    versions: Option<Vec<VersionSpan>>,
}

impl SideData {
    pub(super) fn read(
        data: &[u8],
        fields: &Fields,
        arrivals: Arrivals,
        options: &Options,
        generation: &Generation,
    ) -> Result<Self, Flaw> {
        let experts = match fields.routed_experts.get() {
            Some(text) => Some(experts(data, text, fields, arrivals, options, generation)?),
            None => None,
        };
        let masks = masks(data, fields, arrivals)?;
        let versions = match fields.weight_versions.get() {
            Some(value) if arrivals.is_last => Some(versions(data, value, arrivals.total())?),
            _ => None,
        };
        Ok(Self { experts, masks, versions })
    }

    pub(super) fn apply(self, new: usize, growing: &mut Growing) {
        let generation = &mut growing.generation;
        match self.experts {
            Some((experts, rows)) => (generation.routed_experts, generation.expert_rows) = (Some(experts), rows),
            // Rows that later tokens have outgrown would be misaligned.
            None if new > 0 => (generation.routed_experts, generation.expert_rows) = (None, None),
            None => {}
        }
        match self.masks {
            Masks::Replace(masks) => {
                growing.covers_top_p = true;
                generation.top_p = Some(masks);
            }
            Masks::Append(masks) if growing.covers_top_p => match &mut generation.top_p {
                None => generation.top_p = Some(masks),
                Some(kept) => {
                    let shift = kept.offsets.last().copied().unwrap_or_default();
                    kept.ids.extend(masks.ids);
                    kept.offsets.extend(masks.offsets[1..].iter().map(|offset| offset.saturating_add(shift)));
                }
            },
            Masks::Append(_) | Masks::None if new == 0 => {}
            Masks::Append(_) | Masks::None => {
                growing.covers_top_p = false;
                generation.top_p = None;
            }
        }
        if let Some(versions) = self.versions {
            generation.version_spans = versions;
        }
    }
}

fn experts(
    data: &[u8],
    text: RawStr,
    fields: &Fields,
    arrivals: Arrivals,
    options: &Options,
    generation: &Generation,
) -> Result<(RoutedExperts, Option<usize>), Flaw> {
    let at = fields.routed_experts.at();
    let dtype = match fields.routed_experts_dtype.value {
        Value::Absent | Value::Null => options.experts.map_or(Dtype::Int32, |experts| experts.dtype),
        Value::Is(raw) => {
            let name = decode(data, raw);
            Dtype::from_name(&name)
                .ok_or_else(|| damaged(raw.span.start(), DTYPE, format!("{name:?} is none of int32, uint8, uint16")))?
        }
        Value::Wrong => return Err(damaged(fields.routed_experts_dtype.at(), DTYPE, "a string was expected")),
    };
    let told = fields.prompt_tokens.get().or(generation.prompt_tokens);
    let shape = match (options.experts, options.prompt_len.or(told)) {
        (None, _) => None,
        (Some(_), None) => return Err(damaged(at, EXPERTS, "the length of the prompt is not known; pass prompt_len")),
        (Some(experts), Some(prompt)) => {
            let prompt = usize::try_from(prompt).unwrap_or(usize::MAX);
            let start = usize::try_from(options.experts_start).unwrap_or(usize::MAX);
            let rows = prompt.saturating_add(arrivals.total()).saturating_sub(1).saturating_sub(start);
            let total = arrivals.total();
            let why = format!(
                "{rows} rows ({prompt} of the prompt + {total} tokens - 1 - {start}) of {} layers and top {}",
                experts.num_layers, experts.top_k
            );
            let numbers = rows.checked_mul(experts.num_layers).and_then(|numbers| numbers.checked_mul(experts.top_k));
            let numbers = numbers.ok_or_else(|| damaged(at, EXPERTS, format!("{why}: too many")))?;
            Some((rows, numbers, why))
        }
    };
    let expected = shape.as_ref().map(|(_, numbers, why)| (*numbers, why.as_str()));
    let ids = match dtype {
        Dtype::Int32 => RoutedExperts::Int32(base64_array(data, text, expected, EXPERTS)?),
        Dtype::Uint8 => RoutedExperts::Uint8(base64_array(data, text, expected, EXPERTS)?),
        Dtype::Uint16 => RoutedExperts::Uint16(base64_array(data, text, expected, EXPERTS)?),
    };
    if let Some(experts) = options.experts {
        check_range(&ids, experts.num_experts, at)?;
    }
    Ok((ids, shape.map(|(rows, ..)| rows)))
}

/// Ids lie below the number of experts; -1 marks a row that the engine padded.
fn check_range(ids: &RoutedExperts, num_experts: Option<u32>, at: usize) -> Result<(), Flaw> {
    let limit = num_experts.map_or(i64::MAX, i64::from);
    let is_bad = |id: i64| id >= limit || id < -1;
    let bad = match ids {
        RoutedExperts::Int32(ids) => ids.iter().map(|&id| i64::from(id)).find(|&id| is_bad(id)),
        RoutedExperts::Uint8(ids) => ids.iter().map(|&id| i64::from(id)).find(|&id| is_bad(id)),
        RoutedExperts::Uint16(ids) => ids.iter().map(|&id| i64::from(id)).find(|&id| is_bad(id)),
    };
    match bad {
        None => Ok(()),
        Some(id) => {
            let limit = num_experts.map_or_else(|| "the least is -1".to_owned(), |limit| format!("there are {limit}"));
            Err(damaged(at, EXPERTS, format!("expert {id}, but {limit}; is the dtype another one?")))
        }
    }
}

fn masks(data: &[u8], fields: &Fields, arrivals: Arrivals) -> Result<Masks, Flaw> {
    let ids = fields.top_p_ids.get().or(fields.top_p_kept_ids.get());
    let offsets = fields.top_p_offsets.get().or(fields.top_p_kept_offsets.get());
    match (ids, offsets) {
        (Some(ids), Some(offsets)) => top_p(data, ids, offsets, arrivals),
        (Some(ids), None) => Err(damaged(ids.start(), TOP_P_OFFSETS, "missing beside top_p_token_ids")),
        (None, Some(offsets)) => Err(damaged(offsets.start(), TOP_P_IDS, "missing beside top_p_token_offsets")),
        (None, None) => match fields.sampling_mask.get() {
            Some(mask) => sampling_mask(data, mask, arrivals),
            None => Ok(Masks::None),
        },
    }
}

fn top_p(data: &[u8], ids: Span, offsets: Span, arrivals: Arrivals) -> Result<Masks, Flaw> {
    let at = offsets.start();
    let ids = int32_array(data, ids, TOP_P_IDS)?;
    let offsets = int32_array(data, offsets, TOP_P_OFFSETS)?;
    let is_sound = offsets.first() == Some(&0)
        && offsets.is_sorted()
        && offsets.last().and_then(|&last| usize::try_from(last).ok()) == Some(ids.len());
    if !is_sound {
        let message = format!("offsets must start at 0, never fall, and end at {}, the number of ids", ids.len());
        return Err(damaged(at, TOP_P_OFFSETS, message));
    }
    fit(TopP { ids, offsets }, arrivals, at, TOP_P_OFFSETS)
}

fn fit(masks: TopP, arrivals: Arrivals, at: usize, path: &'static str) -> Result<Masks, Flaw> {
    let tokens = masks.offsets.len() - 1;
    if tokens == arrivals.total() {
        Ok(Masks::Replace(masks))
    } else if tokens == arrivals.new {
        Ok(Masks::Append(masks))
    } else {
        let message = format!("for {tokens} tokens, but the event brings {} of {}", arrivals.new, arrivals.total());
        Err(damaged(at, path, message))
    }
}

/// A list of ids for each token gives the same pair.
fn sampling_mask(data: &[u8], value: Span, arrivals: Arrivals) -> Result<Masks, Flaw> {
    let mut cursor = Cursor::over(data, value);
    let mut masks = TopP { ids: Vec::new(), offsets: vec![0] };
    let wrong = |at| damaged(at, MASK, "a list of ids for each token was expected");
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
        let end = i32::try_from(masks.ids.len()).map_err(|_| damaged(at, MASK, "more than 2147483647 ids"))?;
        masks.offsets.push(end);
        more = cursor.next_element().map_err(|_| wrong(value.start()))?;
    }
    if masks.ids.iter().any(|&id| id < 0) {
        return Err(damaged(value.start(), MASK, "an id is no integer in 0 … 2147483647"));
    }
    let tokens = masks.offsets.len() - 1;
    if tokens == arrivals.len && tokens == arrivals.total() + arrivals.new {
        // Glued like the list of pairs: the last of it is the whole, and its end the delta again.
        let skip = arrivals.new;
        if (0..skip).any(|index| masks.of(index) != masks.of(tokens - skip + index)) {
            return Err(damaged(value.start(), MASK, format!("the first {skip} lists are not the last {skip} again")));
        }
        let first = masks.offsets[skip];
        masks.offsets.drain(..skip);
        masks.offsets.iter_mut().for_each(|offset| *offset -= first);
        masks.ids.drain(..usize::try_from(first).unwrap_or_default());
    }
    fit(masks, arrivals, value.start(), MASK)
}

fn versions(data: &[u8], value: Span, total: usize) -> Result<Vec<VersionSpan>, Flaw> {
    let wrong = |at| damaged(at, VERSIONS, "a list of {version, start, end} was expected");
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
            return Err(damaged(at, VERSIONS, format!("it runs from {} back to {}", span.start, span.end)));
        }
        if span.start < span.end {
            if span.start != expected {
                let message = format!("a span starts at {}, but the one before it ends at {expected}", span.start);
                return Err(damaged(at, VERSIONS, message));
            }
            spans.push(span);
        }
        more = cursor.next_element().map_err(|_| wrong(value.start()))?;
    }
    let end = spans.last().map_or(0, |last| last.end);
    if end != total {
        return Err(damaged(value.start(), VERSIONS, format!("the spans end at {end}, but there are {total} tokens")));
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

/// A string's characters, or a number as it stands on the wire.
pub(super) fn label(data: &[u8], value: Span) -> String {
    let raw = value.of(data);
    let mut text = String::new();
    match raw {
        [b'"', inner @ .., b'"'] => unescape(inner, &mut text),
        _ => text.push_str(std::str::from_utf8(raw).unwrap_or_default()),
    }
    text
}
