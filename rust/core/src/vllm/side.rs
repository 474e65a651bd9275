//! Side data of a vLLM event.

use crate::arrays::metadata_error;
use crate::error::EventError;
use crate::experts::{CheckedExperts, ExpertShape, RowCheck};
use crate::generation::{Generation, RoutedExperts};
use crate::npy::base64_npy;
use crate::options::Options;
use crate::side::{Masks, Progress, SideData, sampling_mask, versions};
use crate::span::{RawStr, Span};
use crate::vllm::fields::Fields;
use crate::vllm::keys::ChoiceKey;

const EXPERTS: &str = ChoiceKey::RoutedExperts.path();
const MASK: &str = ChoiceKey::SamplingMask.path();

/// Parse and check the side data of an event.
pub(super) fn read(
    data: &[u8],
    fields: &Fields,
    progress: Progress,
    options: &Options,
    generation: &Generation,
) -> Result<SideData, EventError> {
    let prompt_tokens = fields.usage.prompt_tokens.get().or(generation.prompt_tokens);
    let experts = match fields.choice.routed_experts.get() {
        Some(text) => Some(experts(data, text, progress.total(), prompt_tokens, options)?),
        None => None,
    };
    let masks = match fields.choice.sampling_mask.get() {
        Some(value) => masks(data, value, progress.new)?,
        None => Masks::None,
    };
    let versions = match fields.weight_versions().filter(|_| progress.is_last) {
        Some((value, path)) => Some(versions(data, value, progress.total(), path)?),
        None => None,
    };
    Ok(SideData { experts, masks, versions })
}

fn experts(
    data: &[u8],
    text: RawStr,
    total: usize,
    prompt_tokens: Option<u64>,
    options: &Options,
) -> Result<CheckedExperts, EventError> {
    let at = text.span.start();
    let array = base64_npy(data, text, EXPERTS)?;
    let shape = ExpertShape::of(options, prompt_tokens, total, at, EXPERTS)?;
    let (Some(experts), Some(shape)) = (options.experts, shape) else {
        return Ok(CheckedExperts { ids: array.numbers, rows: None, padded_rows: 0 });
    };
    let is_whole = array.shape.first().is_some_and(|&rows| rows != shape.rows);
    let rows = if is_whole { shape.rows_before + shape.rows } else { shape.rows };
    if array.shape != [rows, experts.num_layers, experts.top_k] {
        return Err(metadata_error(at, EXPERTS, format!("its shape is {:?}, expected {}", array.shape, shape.why)));
    }
    let check = RowCheck::new(experts);
    match array.numbers {
        RoutedExperts::Int32(ids) => shape.finish(ids, check, is_whole, at, EXPERTS),
        RoutedExperts::Uint8(ids) => shape.finish(ids, check, is_whole, at, EXPERTS),
        RoutedExperts::Uint16(ids) => shape.finish(ids, check, is_whole, at, EXPERTS),
    }
}

/// Masks hold only the new tokens.
fn masks(data: &[u8], value: Span, new: usize) -> Result<Masks, EventError> {
    let masks = sampling_mask(data, value, MASK)?;
    let tokens = masks.offsets.len() - 1;
    if tokens != new {
        return Err(metadata_error(
            value.start(),
            MASK,
            format!("masks for {tokens} tokens, but the event has {new} new tokens"),
        ));
    }
    Ok(Masks::Append(masks))
}
