//! Checks of an SGLang event, except for its counts.

use crate::arrays::element_at;
use crate::checks::{self, excerpt};
use crate::error::{ErrorKind, EventError};
use crate::field::List;
use crate::generation::{FinishReason, Generation};
use crate::options::Options;
use crate::sglang::buffers::{Elements, EventBuffers, pair_at};
use crate::sglang::counts::{Shape, Step};
use crate::sglang::fields::{Fields, Finish, MetaFields};
use crate::sglang::keys::{EventKey, MetaKey};
use crate::sglang::paths::{COMPLETION, FINISH, IDS, LENGTH, PAIRS, PROMPT_IDS, PROMPT_TOKENS};

/// `meta_info` and the finish type.
pub(super) fn finish(fields: &Fields) -> Result<Option<Finish>, EventError> {
    if !fields.is_object {
        return Err(EventError::new(ErrorKind::Schema, 0, "", "an event must be a JSON object"));
    }
    if fields.meta_info.get().is_none() {
        let message = "expected an object; routers that drop unknown fields can produce such events";
        return Err(EventError::new(ErrorKind::Schema, fields.meta_info.at(), EventKey::MetaInfo.path(), message));
    }
    let finish = &fields.meta.finish;
    if finish.is_wrong() {
        return Err(EventError::new(ErrorKind::Schema, finish.at(), FINISH, "expected null or an object with a type"));
    }
    match finish.get() {
        Some(Finish { reason: None, .. }) => Err(EventError::new(
            ErrorKind::Schema,
            finish.at(),
            format!("{FINISH}.type"),
            "expected \"stop\", \"length\" or \"abort\"",
        )),
        Some(Finish { reason: Some(FinishReason::Abort), status, .. }) if status.is_wrong() => {
            Err(EventError::new(ErrorKind::Schema, status.at(), format!("{FINISH}.status_code"), "expected an integer"))
        }
        found => Ok(found),
    }
}

/// `index` and `id`: one stream is one request.
pub(super) fn identity(data: &[u8], fields: &Fields, known: Option<&str>) -> Result<(), EventError> {
    checks::index(&fields.index, EventKey::Index.path())?;
    checks::id(data, &fields.meta.id, known, MetaKey::Id.path())
}

/// The types of all fields. Fields that are skipped here (`_`) have their own check elsewhere.
pub(super) fn types(fields: &Fields) -> Result<(), EventError> {
    let Fields { is_object: _, text, output_ids, prompt_token_ids, index: _, errors: _, meta_info: _, meta } = fields;
    let MetaFields {
        id: _,
        finish: _,
        prompt_tokens,
        completion_tokens,
        cached_tokens,
        pairs,
        length,
        weight_version,
        weight_versions: _,
        routed_experts,
        routed_experts_dtype: _,
        routed_experts_start: _,
        top_p_ids: _,
        top_p_offsets: _,
        top_p_kept_ids: _,
        top_p_kept_offsets: _,
        sampling_mask: _,
    } = meta;
    text.check_type(EventKey::Text.path())?;
    output_ids.check_type(IDS)?;
    prompt_token_ids.check_type(PROMPT_IDS)?;
    pairs.check_type(PAIRS)?;
    length.check_type(LENGTH)?;
    completion_tokens.check_type(COMPLETION)?;
    prompt_tokens.check_type(PROMPT_TOKENS)?;
    cached_tokens.check_type(MetaKey::CachedTokens.path())?;
    weight_version.check_type(MetaKey::WeightVersion.path())?;
    routed_experts.check_type(MetaKey::RoutedExperts.path())?;
    if let Some((index, at)) = pairs.as_ref().and_then(List::malformed) {
        let path = format!("{PAIRS}[{index}]");
        return Err(EventError::new(ErrorKind::Schema, at, path, "expected [logprob, token id, text]"));
    }
    Ok(())
}

/// `output_ids` equal the ids of the pairs.
pub(super) fn ids_beside_pairs(
    data: &[u8],
    fields: &Fields,
    buffers: &EventBuffers,
    kept: &Generation,
) -> Result<(), EventError> {
    let (Some(pairs), Some(ids)) = (fields.meta.pairs.as_ref(), fields.output_ids.as_ref()) else { return Ok(()) };
    if pairs.len() != ids.len() {
        let message = format!("{} ids but {} pairs: one of the lists is incomplete", ids.len(), pairs.len());
        return Err(EventError::new(ErrorKind::Mismatch, fields.output_ids.at(), IDS, message));
    }
    let Some(index) = buffers.first_mismatch(data, pairs, ids, kept) else { return Ok(()) };
    let at = element_at(data, ids.start(), index);
    let pair = excerpt(data, pair_at(data, pairs, index, 1));
    let message = format!("{} in output_ids, but {pair} in the pair: the ids of one event differ", excerpt(data, at));
    Err(EventError::new(ErrorKind::Mismatch, at, format!("{IDS}[{index}]"), message))
}

/// A list that repeats earlier tokens does not change them.
pub(super) fn prefix(
    data: &[u8],
    list: Option<&List>,
    elements: Elements<'_>,
    step: Step,
    kept: &Generation,
) -> Result<(), EventError> {
    let start = match step.shape {
        Shape::Whole => 0,
        Shape::DeltaThenWhole => step.new,
        Shape::Marker | Shape::Delta => return Ok(()),
    };
    let (Some(list), Some(index)) = (list, elements.first_change(start)) else { return Ok(()) };
    let path = if kept.logprobs.is_some() { PAIRS } else { IDS };
    let message = format!(
        "token {index} was {} and is changed or missing in this event: the engine generated again from the start; \
         only the {} tokens kept belong together",
        kept.token_ids[index],
        kept.token_ids.len()
    );
    let index = start + index;
    Err(EventError::new(ErrorKind::Prefix, element_at(data, list.start(), index), format!("{path}[{index}]"), message))
}

/// The new ids, in the buffers from `start` on.
pub(super) fn ids(
    data: &[u8],
    list: Option<&List>,
    step: Step,
    buffers: &EventBuffers,
    start: usize,
) -> Result<(), EventError> {
    let Some(list) = list else { return Ok(()) };
    checks::ids(data, &buffers.ids[start..][..step.new], |bad| {
        let index = step.first + bad;
        if buffers.has_pairs {
            (pair_at(data, list, index, 1), format!("{PAIRS}[{index}][1]"))
        } else {
            (element_at(data, list.start(), index), format!("{IDS}[{index}]"))
        }
    })
}

/// The new logprobs. Returns how many are the substitute for minus infinity, if those are kept.
pub(super) fn logprobs(
    data: &[u8],
    list: Option<&List>,
    step: Step,
    buffers: &EventBuffers,
    start: usize,
    options: &Options,
) -> Result<usize, EventError> {
    let Some(list) = list.filter(|_| buffers.has_pairs) else { return Ok(0) };
    checks::logprobs(data, &buffers.logprobs[start..][..step.new], options.clamped, |bad| {
        let index = step.first + bad;
        (pair_at(data, list, index, 0), format!("{PAIRS}[{index}][0]"))
    })
}
