//! `simd-json`'s tape, whose memory is used again for each event.

use simd_json::prelude::*;
use simd_json::tape::Value;
use simd_json::{Buffers, Tape};

use super::{Arrays, events};

fn push(arrays: &mut Arrays, id: Option<i32>, logprob: Option<f64>) {
    arrays.token_ids.push(id.expect("a token id"));
    arrays.logprobs.push(logprob.expect("a logprob"));
}

fn fold(body: &[u8], read: impl Fn(&mut Arrays, Value<'_, '_>)) -> Arrays {
    let mut arrays = Arrays::default();
    let mut buffers = Buffers::default();
    let mut tape = Tape::null();
    let mut event = Vec::new();
    for data in events(body) {
        // It writes into its input.
        event.clear();
        event.extend_from_slice(data);
        tape = {
            let mut tape = tape.reset();
            simd_json::fill_tape(&mut event, &mut buffers, &mut tape).expect("sound");
            read(&mut arrays, tape.as_value());
            tape.reset()
        };
    }
    arrays
}

/// SGLang.
///
/// # Panics
///
/// If the stream is not sound.
#[must_use]
pub fn simd_json_sglang(body: &[u8]) -> Arrays {
    fold(body, |arrays, event| {
        arrays.text.push_str(event.get_str("text").unwrap_or_default());
        let pairs = event.get("meta_info").and_then(|meta| meta.get("output_token_logprobs"));
        for pair in &pairs.and_then(|pairs| pairs.as_array()).expect("pairs") {
            let pair = pair.as_array().expect("a pair");
            push(arrays, pair.get(1).and_then(|id| id.as_i32()), pair.get(0).and_then(|logprob| logprob.as_f64()));
        }
    })
}

/// vLLM.
///
/// # Panics
///
/// If the stream is not sound.
#[must_use]
pub fn simd_json_vllm(body: &[u8]) -> Arrays {
    fold(body, |arrays, event| {
        for choice in &event.get("choices").and_then(|choices| choices.as_array()).expect("choices") {
            let entries = choice.get("logprobs").and_then(|logprobs| logprobs.get("content"));
            for entry in &entries.and_then(|entries| entries.as_array()).expect("entries") {
                push(arrays, entry.get_i32("token_id"), entry.get_f64("logprob"));
            }
        }
    })
}
