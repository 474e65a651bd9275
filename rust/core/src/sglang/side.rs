//! Side data of an SGLang event.

use crate::arrays::{base64_array, base64_length, int32_array, metadata_error};
use crate::error::EventError;
use crate::experts::{CheckedExperts, ExpertId, ExpertShape, RowCheck};
use crate::field::Value;
use crate::generation::{Generation, RoutedExperts, TopP};
use crate::options::{Dtype, Experts, Options};
use crate::sglang::fields::Fields;
use crate::sglang::keys::MetaKey;
use crate::side::{Masks, Progress, SideData, sampling_mask, versions};
use crate::span::{RawStr, Span};
use crate::text::decode;

const EXPERTS: &str = MetaKey::RoutedExperts.path();
const DTYPE: &str = MetaKey::RoutedExpertsDtype.path();
const START: &str = MetaKey::RoutedExpertsStart.path();
const TOP_P_IDS: &str = MetaKey::TopPIds.path();
const TOP_P_OFFSETS: &str = MetaKey::TopPOffsets.path();
const MASK: &str = MetaKey::SamplingMask.path();
const VERSIONS: &str = MetaKey::WeightVersions.path();

/// Parse and check the side data of an event whose list has `len` elements.
pub(super) fn read(
    data: &[u8],
    fields: &Fields,
    progress: Progress,
    len: usize,
    options: &Options,
    generation: &Generation,
) -> Result<SideData, EventError> {
    let experts = match fields.meta.routed_experts.get() {
        Some(text) => Some(experts(data, text, fields, progress, options, generation)?),
        None => None,
    };
    let masks = masks(data, fields, progress, len)?;
    let versions = match fields.meta.weight_versions.get() {
        Some(value) if progress.is_last => Some(versions(data, value, progress.total(), VERSIONS)?),
        _ => None,
    };
    Ok(SideData { experts, masks, versions })
}

fn experts(
    data: &[u8],
    text: RawStr,
    fields: &Fields,
    progress: Progress,
    options: &Options,
    generation: &Generation,
) -> Result<CheckedExperts, EventError> {
    let at = fields.meta.routed_experts.at();
    let prompt_tokens = fields.meta.prompt_tokens.get().or(generation.prompt_tokens);
    let shape = ExpertShape::of(options, prompt_tokens, progress.total(), at, EXPERTS)?;
    let dtype = told_dtype(data, fields)?;
    let (Some(asked), Some(shape)) = (options.experts, shape) else {
        let ids = match dtype.unwrap_or(Dtype::Int32) {
            Dtype::Int32 => RoutedExperts::Int32(base64_array(data, text, None, EXPERTS, |_| {})?),
            Dtype::Uint8 => RoutedExperts::Uint8(base64_array(data, text, None, EXPERTS, |_| {})?),
            Dtype::Uint16 => RoutedExperts::Uint16(base64_array(data, text, None, EXPERTS, |_| {})?),
        };
        return Ok(CheckedExperts { ids, rows: None, padded_rows: 0 });
    };
    let start = told_start(fields, options.experts_start)?;
    let forms = forms(base64_length(data, text), dtype, asked, start, &shape);
    let read = |form: Form| match form.dtype {
        Dtype::Int32 => checked_array::<i32>(data, text, form, asked, &shape),
        Dtype::Uint8 => checked_array::<u8>(data, text, form, asked, &shape),
        Dtype::Uint16 => checked_array::<u16>(data, text, form, asked, &shape),
    };
    match forms[..] {
        [first, second] => {
            // As many bytes have the rows from the start on as int32, and all rows in the smaller dtype.
            let largest = if second.dtype == Dtype::Uint8 { 255 } else { 65535 };
            match read(first) {
                Ok(CheckedExperts { ids: RoutedExperts::Int32(ids), .. })
                    if ids.iter().any(|id| !(-1..=largest).contains(id)) =>
                {
                    read(second)
                }
                Ok(found) => Ok(found),
                Err(error) => read(second).map_err(|_| error),
            }
        }
        [form, ..] => read(form),
        [] => read(Form { dtype: dtype.unwrap_or(asked.dtype), is_whole: start == Some(true) }),
    }
}

/// The dtype that the event names.
fn told_dtype(data: &[u8], fields: &Fields) -> Result<Option<Dtype>, EventError> {
    match fields.meta.routed_experts_dtype.value {
        Value::Absent | Value::Null => Ok(None),
        Value::Is(raw) => {
            let name = decode(data, raw);
            let unknown =
                || metadata_error(raw.span.start(), DTYPE, format!("expected int32, uint8 or uint16, not {name:?}"));
            Dtype::from_name(&name).map(Some).ok_or_else(unknown)
        }
        Value::Wrong => Err(metadata_error(fields.meta.routed_experts_dtype.at(), DTYPE, "expected a string")),
    }
}

/// Whether the rows start at 0 instead of at the requested start, if the event tells where.
fn told_start(fields: &Fields, requested: u64) -> Result<Option<bool>, EventError> {
    let field = &fields.meta.routed_experts_start;
    if field.is_wrong() {
        return Err(metadata_error(field.at(), START, "expected an integer"));
    }
    match field.get() {
        None => Ok(None),
        Some(told) if told == requested => Ok(Some(false)),
        Some(0) => Ok(Some(true)),
        Some(told) => {
            let message = format!("the rows start at {told}, but were requested from {requested} on");
            Err(metadata_error(field.at(), START, message))
        }
    }
}

/// How routed experts are sent.
#[derive(Clone, Copy)]
struct Form {
    dtype: Dtype,
    /// Whether all rows were sent, although later ones were requested.
    is_whole: bool,
}

/// The forms that have as many bytes as were sent, the likeliest first.
///
/// Older engines do not know the key for another dtype, and send int32, or the key for the start, and send all rows.
/// Routers drop both keys.
fn forms(
    bytes: Option<usize>,
    dtype: Option<Dtype>,
    asked: Experts,
    start: Option<bool>,
    shape: &ExpertShape,
) -> Vec<Form> {
    let wholes = if shape.rows_before == 0 { &[false][..] } else { &[false, true] };
    let dtypes = match dtype {
        Some(dtype) => &[dtype][..],
        None if asked.dtype == Dtype::Int32 => &[Dtype::Int32],
        None => &[Dtype::Int32, asked.dtype],
    };
    let all = wholes.iter().flat_map(|&is_whole| dtypes.iter().map(move |&dtype| Form { dtype, is_whole }));
    let fits = |form: &Form| {
        let size = shape.numbers(form.is_whole).checked_mul(form.dtype.size()).filter(|&size| size > 0);
        start.is_none_or(|is_whole| form.is_whole == is_whole) && size.is_some() && size == bytes
    };
    all.filter(fits).collect()
}

fn checked_array<T: ExpertId>(
    data: &[u8],
    text: RawStr,
    form: Form,
    asked: Experts,
    shape: &ExpertShape,
) -> Result<CheckedExperts, EventError> {
    let mut check = RowCheck::new(asked);
    let expected = Some((shape.numbers(form.is_whole), shape.why.as_str()));
    let ids: Vec<T> = base64_array(data, text, expected, EXPERTS, |ids| check.check_new(ids))?;
    shape.finish(ids, check, form.is_whole, text.span.start(), EXPERTS)
}

fn masks(data: &[u8], fields: &Fields, progress: Progress, len: usize) -> Result<Masks, EventError> {
    let ids = fields.meta.top_p_ids.get().or(fields.meta.top_p_kept_ids.get());
    let offsets = fields.meta.top_p_offsets.get().or(fields.meta.top_p_kept_offsets.get());
    match (ids, offsets) {
        (Some(ids), Some(offsets)) => top_p(data, ids, offsets, progress),
        (Some(ids), None) => Err(metadata_error(ids.start(), TOP_P_OFFSETS, "missing beside top_p_token_ids")),
        (None, Some(offsets)) => Err(metadata_error(offsets.start(), TOP_P_IDS, "missing beside top_p_token_offsets")),
        (None, None) => match fields.meta.sampling_mask.get() {
            Some(value) => {
                let masks = without_repeated_delta(sampling_mask(data, value, MASK)?, progress, len, value)?;
                fit(masks, progress, value.start(), MASK)
            }
            None => Ok(Masks::None),
        },
    }
}

fn top_p(data: &[u8], ids: Span, offsets: Span, progress: Progress) -> Result<Masks, EventError> {
    let at = offsets.start();
    let ids = int32_array(data, ids, TOP_P_IDS)?;
    let offsets = int32_array(data, offsets, TOP_P_OFFSETS)?;
    let is_sound = offsets.first() == Some(&0)
        && offsets.is_sorted()
        && offsets.last().and_then(|&last| usize::try_from(last).ok()) == Some(ids.len());
    if !is_sound {
        let message = format!("offsets must start at 0, never decrease, and end at {}, the number of ids", ids.len());
        return Err(metadata_error(at, TOP_P_OFFSETS, message));
    }
    fit(TopP { ids, offsets }, progress, at, TOP_P_OFFSETS)
}

fn fit(masks: TopP, progress: Progress, at: usize, path: &'static str) -> Result<Masks, EventError> {
    let tokens = masks.offsets.len() - 1;
    if tokens == progress.total() {
        Ok(Masks::Replace(masks))
    } else if tokens == progress.new {
        Ok(Masks::Append(masks))
    } else {
        let message =
            format!("masks for {tokens} tokens, but the event has {} new tokens of {}", progress.new, progress.total());
        Err(metadata_error(at, path, message))
    }
}

/// Masks without the delta before the whole list, if they have one as the list of pairs does.
fn without_repeated_delta(mut masks: TopP, progress: Progress, len: usize, value: Span) -> Result<TopP, EventError> {
    let tokens = masks.offsets.len() - 1;
    if tokens == len && tokens == progress.total() + progress.new {
        // The whole list is at the end, and it ends with the delta again.
        let skip = progress.new;
        if (0..skip).any(|index| masks.of(index) != masks.of(tokens - skip + index)) {
            return Err(metadata_error(
                value.start(),
                MASK,
                format!("the first {skip} lists differ from the last {skip}, which they should repeat"),
            ));
        }
        let first = masks.offsets[skip];
        masks.offsets.drain(..skip);
        masks.offsets.iter_mut().for_each(|offset| *offset -= first);
        masks.ids.drain(..usize::try_from(first).unwrap_or_default());
    }
    Ok(masks)
}
