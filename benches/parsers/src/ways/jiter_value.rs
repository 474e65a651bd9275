//! `jiter` into its own value.

use jiter::JsonValue;

use super::{Arrays, events};

fn get<'a, 'j>(value: &'a JsonValue<'j>, key: &str) -> &'a JsonValue<'j> {
    let JsonValue::Object(object) = value else { panic!("no object around {key}") };
    object.iter().find(|(name, _)| name == key).map_or(&JsonValue::Null, |(_, value)| value)
}

fn items<'a, 'j>(value: &'a JsonValue<'j>) -> &'a [JsonValue<'j>] {
    if let JsonValue::Array(items) = value { items } else { &[] }
}

fn push(arrays: &mut Arrays, id: &JsonValue<'_>, logprob: &JsonValue<'_>) {
    let (JsonValue::Int(id), JsonValue::Float(logprob)) = (id, logprob) else { panic!("no token") };
    arrays.token_ids.push(i32::try_from(*id).expect("a token id"));
    arrays.logprobs.push(*logprob);
}

/// SGLang.
///
/// # Panics
///
/// If the stream is not sound.
#[must_use]
pub fn jiter_sglang(body: &[u8]) -> Arrays {
    let mut arrays = Arrays::default();
    for data in events(body) {
        let event = JsonValue::parse(data, false).expect("sound");
        if let JsonValue::Str(text) = get(&event, "text") {
            arrays.text.push_str(text);
        }
        for pair in items(get(get(&event, "meta_info"), "output_token_logprobs")) {
            let pair = items(pair);
            push(&mut arrays, &pair[1], &pair[0]);
        }
    }
    arrays
}

/// vLLM.
///
/// # Panics
///
/// If the stream is not sound.
#[must_use]
pub fn jiter_vllm(body: &[u8]) -> Arrays {
    let mut arrays = Arrays::default();
    for data in events(body) {
        let event = JsonValue::parse(data, false).expect("sound");
        for choice in items(get(&event, "choices")) {
            for entry in items(get(get(choice, "logprobs"), "content")) {
                push(&mut arrays, get(entry, "token_id"), get(entry, "logprob"));
            }
        }
    }
    arrays
}
