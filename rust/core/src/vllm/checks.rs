//! Checks of a vLLM event, in their order.

use crate::arrays::element_at;
use crate::checks::{self, excerpt};
use crate::error::{ErrorKind, EventError};
use crate::field::List;
use crate::generation::FinishReason;
use crate::json::Cursor;
use crate::options::Options;
use crate::text::{decode, name};
use crate::vllm::api::Api;
use crate::vllm::buffers::EventBuffers;
use crate::vllm::fields::{Choice, Fields, Usage};
use crate::vllm::keys::{ChoiceKey, EventKey, UsageKey};

pub(super) const CHOICE: &str = "choices[0]";
const IDS: &str = ChoiceKey::TokenIds.path();
const FINISH: &str = ChoiceKey::FinishReason.path();
const TOKENS: &str = "choices[0].logprobs.tokens";
const COMPLETION: &str = UsageKey::CompletionTokens.path();
pub(super) const PROMPT: &str = UsageKey::PromptTokens.path();

fn schema(at: usize, path: &'static str, message: impl Into<std::borrow::Cow<'static, str>>) -> EventError {
    EventError::new(ErrorKind::Schema, at, path, message)
}

/// `choices` and the finish reason.
pub(super) fn finish(data: &[u8], fields: &Fields) -> Result<Option<FinishReason>, EventError> {
    if !fields.is_object {
        return Err(schema(0, "", "an event must be a JSON object"));
    }
    let choices = &fields.choices;
    match choices.get() {
        None => return Err(schema(choices.at(), EventKey::Choices.path(), "expected a list")),
        Some(0) => return Ok(None),
        Some(1) => {}
        Some(count) => {
            let message = format!("{count} choices in one event, but a parser reads one generation; request n = 1");
            return Err(schema(choices.at(), EventKey::Choices.path(), message));
        }
    }
    let choice = &fields.choice;
    if choice.object.get().is_none() {
        return Err(schema(choice.object.at(), CHOICE, "expected an object"));
    }
    let expected = "expected null, \"stop\", \"length\", \"abort\", \"cancelled\" or \"repetition\"";
    if choice.finish.is_wrong() {
        return Err(schema(choice.finish.at(), FINISH, expected));
    }
    let Some(raw) = choice.finish.get() else { return Ok(None) };
    match &*name(data, raw) {
        b"stop" | b"repetition" => Ok(Some(FinishReason::Stop)),
        b"length" => Ok(Some(FinishReason::Length)),
        b"abort" | b"cancelled" => Ok(Some(FinishReason::Abort)),
        _ => Err(schema(choice.finish.at(), FINISH, format!("found {:?}, {expected}", decode(data, raw)))),
    }
}

/// `index` and the request id: one stream is one request.
pub(super) fn identity(data: &[u8], fields: &Fields, api: Api, known: Option<&str>) -> Result<(), EventError> {
    checks::index(&fields.choice.index, ChoiceKey::Index.path())?;
    checks::id(data, &fields.id, known, api.id_path())
}

/// The types of all fields. Fields that are skipped here (`_`) have their own check elsewhere.
pub(super) fn types(data: &[u8], fields: &Fields, api: Api) -> Result<(), EventError> {
    let Fields {
        is_object: _,
        errors: _,
        id: _,
        output_mode: _,
        prompt_token_ids,
        versions,
        choices: _,
        choice,
        usage,
    } = fields;
    let Choice {
        object: _,
        index: _,
        finish: _,
        matched: _,
        token_ids,
        prompt_token_ids: choice_prompt_token_ids,
        text,
        logprobs,
        routed_experts,
        sampling_mask: _,
        versions: choice_versions,
    } = choice;
    let Usage { object: usage, prompt_tokens, completion_tokens, details, cached_tokens } = usage;
    token_ids.check_type(IDS)?;
    prompt_token_ids.check_type(EventKey::PromptTokenIds.path())?;
    choice_prompt_token_ids.check_type(ChoiceKey::PromptTokenIds.path())?;
    text.check_type(ChoiceKey::Text.path())?;
    logprobs.object.check_type(ChoiceKey::Logprobs.path())?;
    logprobs.list.check_type(api.list_path())?;
    logprobs.tokens.check_type(TOKENS)?;
    routed_experts.check_type(ChoiceKey::RoutedExperts.path())?;
    choice_versions.weight_version.check_type(ChoiceKey::WeightVersion.path())?;
    versions.weight_version.check_type(EventKey::WeightVersion.path())?;
    usage.check_type(EventKey::Usage.path())?;
    completion_tokens.check_type(COMPLETION)?;
    prompt_tokens.check_type(PROMPT)?;
    details.check_type(UsageKey::PromptTokensDetails.path())?;
    cached_tokens.check_type("usage.prompt_tokens_details.cached_tokens")?;
    match logprobs.list.get().and_then(|list| Some((list, list.malformed()?))) {
        Some((list, (index, at))) if api == Api::Generate && element_at(data, list.start(), index) == at => {
            let path = format!("{}[{index}]", api.list_path());
            Err(EventError::new(ErrorKind::Schema, at, path, "expected an object with a logprob"))
        }
        Some((_, (index, at))) => {
            Err(EventError::new(ErrorKind::Schema, at, api.logprob_path(index), "expected a number"))
        }
        None => Ok(()),
    }
}

/// Token ids are present beside text or logprobs, and logprobs beside token ids if they were requested.
pub(super) fn presence(data: &[u8], fields: &Fields, options: &Options, api: Api) -> Result<(), EventError> {
    let choice = &fields.choice;
    let (at, list) = (choice.object.at(), choice.logprobs.list.get());
    let Some(ids) = choice.token_ids.get() else {
        if list.is_some_and(|list| list.len() > 0)
            || choice.text.get().is_some_and(|text| !text.span.of(data).is_empty())
        {
            return Err(schema(at, IDS, "missing, although the event has text or logprobs; request return_token_ids"));
        }
        return Ok(());
    };
    if options.logprobs && ids.len() > 0 && list.is_none() {
        let message = format!("missing beside {} token ids, although logprobs were requested", ids.len());
        return Err(schema(at, api.list_path(), message));
    }
    Ok(())
}

/// A terminal event, after a stream that never said how many tokens there are.
pub(super) fn uncounted(fields: &Fields) -> EventError {
    let message = "the stream ends without any token_ids or usage, so its tokens are not known; request \
                   return_token_ids, and check that no router drops them";
    schema(fields.choice.object.at(), IDS, message)
}

/// Each list has an element for each token, and the engine reports as many tokens as were received.
pub(super) fn counts(fields: &Fields, kept: usize, new: usize, options: &Options, api: Api) -> Result<(), EventError> {
    let logprobs = &fields.choice.logprobs;
    for (list, path) in [(&logprobs.list, api.list_path()), (&logprobs.tokens, TOKENS)] {
        if let Some(len) = list.get().map(|list| list.len()).filter(|&len| len != new) {
            let message = format!("{len} elements beside {new} token ids: one of the lists is incomplete");
            return Err(EventError::new(ErrorKind::Length, list.at(), path, message));
        }
    }
    let usage = &fields.usage;
    if let Some(reported) = usage.completion_tokens.get().filter(|&reported| reported != (kept + new) as u64) {
        let message = format!(
            "the engine reports {reported} tokens, {kept} were kept and the event has {new}: tokens were lost or \
             repeated on the way; resume from the tokens kept"
        );
        return Err(EventError::new(ErrorKind::Length, usage.completion_tokens.at(), COMPLETION, message));
    }
    checks::prompt_tokens(&usage.prompt_tokens, options, PROMPT)
}

/// The id beside a logprob equals the token id.
pub(super) fn mismatch(data: &[u8], fields: &Fields, buffers: &EventBuffers, api: Api) -> Result<(), EventError> {
    // In text mode these are texts, which may look like ids.
    let ids = fields.choice.token_ids.get().filter(|_| !fields.is_text_mode(data));
    let (Some(ids), Some(index)) = (ids, buffers.first_mismatch()) else { return Ok(()) };
    let at = element_at(data, ids.start(), index);
    let (id, named) = (excerpt(data, at), buffers.named_ids[index]);
    let named = if named < 0 { "no token id".to_owned() } else { named.to_string() };
    let message = format!("{id}, but {named} in {}[{index}]: the ids of one event differ", api.list_path());
    Err(EventError::new(ErrorKind::Mismatch, at, format!("{IDS}[{index}]"), message))
}

/// The new ids.
pub(super) fn ids(data: &[u8], list: Option<List>, buffers: &EventBuffers) -> Result<(), EventError> {
    let Some(list) = list else { return Ok(()) };
    checks::ids(data, &buffers.ids, |index| (element_at(data, list.start(), index), format!("{IDS}[{index}]")))
}

/// The new logprobs. Returns how many are the substitute for minus infinity, if those are kept.
pub(super) fn logprobs(
    data: &[u8],
    fields: &Fields,
    buffers: &EventBuffers,
    options: &Options,
    api: Api,
) -> Result<usize, EventError> {
    let Some(list) = fields.choice.logprobs.list.get() else { return Ok(0) };
    checks::logprobs(data, &buffers.logprobs, options.clamped, |index| {
        let element = element_at(data, list.start(), index);
        let at = if api == Api::Generate { logprob_at(data, element) } else { element };
        (at, api.logprob_path(index))
    })
}

/// The offset of an entry's logprob; of the entry itself, if it has none.
fn logprob_at(data: &[u8], entry: usize) -> usize {
    let mut cursor = Cursor::new(data);
    cursor.at = entry;
    let mut found = entry;
    let mut key = cursor.next_object();
    while let Ok(Some(raw)) = key {
        let Ok(value) = cursor.skip_value(6) else { break };
        if *name(data, raw) == *b"logprob" {
            found = value.start();
        }
        key = cursor.next_member();
    }
    found
}
