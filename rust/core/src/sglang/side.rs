//! Side data of an SGLang event.

use crate::arrays::{base64_array, base64_length, int32_array, metadata_error};
use crate::error::EventError;
use crate::experts::{CheckedExperts, ExpertId, ExpertShape, RowCheck};
use crate::field::Value;
use crate::generation::{Generation, RoutedExperts, TopP};
use crate::options::{Dtype, Options};
use crate::sglang::fields::Fields;
use crate::sglang::keys::MetaKey;
use crate::side::{Masks, Progress, SideData, sampling_mask, versions};
use crate::span::{RawStr, Span};
use crate::text::decode;

const EXPERTS: &str = MetaKey::RoutedExperts.path();
const DTYPE: &str = MetaKey::RoutedExpertsDtype.path();
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
    let dtype = match fields.meta.routed_experts_dtype.value {
        Value::Absent | Value::Null => {
            // Older engines do not know the key that requests another dtype, and routers drop it: they send int32.
            let is_int32 = shape.as_ref().is_some_and(|shape| {
                let size = shape.numbers.checked_mul(size_of::<i32>()).filter(|&size| size > 0);
                size.is_some() && base64_length(data, text) == size
            });
            options.experts.filter(|_| !is_int32).map_or(Dtype::Int32, |experts| experts.dtype)
        }
        Value::Is(raw) => {
            let name = decode(data, raw);
            Dtype::from_name(&name).ok_or_else(|| {
                metadata_error(raw.span.start(), DTYPE, format!("expected int32, uint8 or uint16, not {name:?}"))
            })?
        }
        Value::Wrong => {
            return Err(metadata_error(fields.meta.routed_experts_dtype.at(), DTYPE, "expected a string"));
        }
    };
    let expected = shape.as_ref().map(|shape| (shape.numbers, shape.why.as_str()));
    let mut check = options.experts.map(RowCheck::new);
    let ids = match dtype {
        Dtype::Int32 => RoutedExperts::Int32(checked_array(data, text, expected, check.as_mut())?),
        Dtype::Uint8 => RoutedExperts::Uint8(checked_array(data, text, expected, check.as_mut())?),
        Dtype::Uint16 => RoutedExperts::Uint16(checked_array(data, text, expected, check.as_mut())?),
    };
    let padded_rows = check.map_or(Ok(0), |check| check.finish(at, EXPERTS))?;
    Ok(CheckedExperts { ids, rows: shape.map(|shape| shape.rows), padded_rows })
}

fn checked_array<T: ExpertId>(
    data: &[u8],
    text: RawStr,
    expected: Option<(usize, &str)>,
    check: Option<&mut RowCheck>,
) -> Result<Vec<T>, EventError> {
    match check {
        Some(check) => base64_array(data, text, expected, EXPERTS, |ids| check.check_new(ids)),
        None => base64_array(data, text, expected, EXPERTS, |_| {}),
    }
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
