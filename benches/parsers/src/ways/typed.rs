//! `sonic-rs` and `serde_json` into structs that hold only what is needed.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{Arrays, events};

#[derive(Deserialize)]
struct Sglang<'a> {
    #[serde(borrow)]
    text: Cow<'a, str>,
    meta_info: MetaInfo,
}

#[derive(Deserialize)]
struct MetaInfo {
    output_token_logprobs: Vec<(f64, i32, IgnoredAny)>,
}

#[derive(Deserialize)]
struct Vllm {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    logprobs: Logprobs,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    token_id: i32,
    logprob: f64,
}

fn sglang<'a, E: std::fmt::Debug>(body: &'a [u8], read: impl Fn(&'a [u8]) -> Result<Sglang<'a>, E>) -> Arrays {
    let mut arrays = Arrays::default();
    for data in events(body) {
        let event = read(data).expect("sound");
        arrays.text.push_str(&event.text);
        for (logprob, id, _) in event.meta_info.output_token_logprobs {
            arrays.logprobs.push(logprob);
            arrays.token_ids.push(id);
        }
    }
    arrays
}

fn vllm<'a, E: std::fmt::Debug>(body: &'a [u8], read: impl Fn(&'a [u8]) -> Result<Vllm, E>) -> Arrays {
    let mut arrays = Arrays::default();
    for data in events(body) {
        let event = read(data).expect("sound");
        for entry in event.choices.into_iter().flat_map(|choice| choice.logprobs.content) {
            arrays.logprobs.push(entry.logprob);
            arrays.token_ids.push(entry.token_id);
        }
    }
    arrays
}

/// `sonic-rs`, SGLang.
#[must_use]
pub fn sonic_sglang(body: &[u8]) -> Arrays {
    sglang(body, sonic_rs::from_slice)
}

/// `sonic-rs`, vLLM.
#[must_use]
pub fn sonic_vllm(body: &[u8]) -> Arrays {
    vllm(body, sonic_rs::from_slice)
}

/// `serde_json`, SGLang.
#[must_use]
pub fn serde_json_sglang(body: &[u8]) -> Arrays {
    sglang(body, serde_json::from_slice)
}

/// `serde_json`, vLLM.
#[must_use]
pub fn serde_json_vllm(body: &[u8]) -> Arrays {
    vllm(body, serde_json::from_slice)
}
