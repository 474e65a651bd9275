//! Random streams as the engines write them, valid and damaged, and a function that splits them.

use proptest::prelude::*;
use streamfold_core::{Clamped, Dialect, Dtype, Experts, Options};

use crate::{sglang, vllm};

/// Split `body` at each of `places`, taken modulo its length.
pub fn split<'a>(body: &'a [u8], places: &[usize]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = places.iter().map(|place| place % (body.len() + 1)).collect();
    places.sort_unstable();
    let mut parts = Vec::new();
    let mut rest = 0;
    for place in places {
        parts.push(&body[rest..place]);
        rest = place;
    }
    parts.push(&body[rest..]);
    parts
}

pub fn options() -> impl Strategy<Value = Options> {
    let dtypes = prop_oneof![Just(Dtype::Int32), Just(Dtype::Uint8), Just(Dtype::Uint16)];
    let experts = prop::option::of((1..3_usize, 1..3_usize, prop::option::of(1..9_u32), dtypes));
    let limits = (prop::option::weighted(0.3, 0..6_usize), prop_oneof![Just(1 << 30), 20..400_usize]);
    (any::<bool>(), experts, prop::option::of(0..5_u64), any::<bool>(), limits).prop_map(
        |(logprobs, experts, prompt_len, keep, (token_limit, max_event_bytes))| Options {
            logprobs,
            experts: experts.map(|(num_layers, top_k, num_experts, dtype)| Experts {
                num_layers,
                top_k,
                num_experts,
                dtype,
            }),
            prompt_len,
            experts_start: 0,
            clamped: if keep { Clamped::Keep } else { Clamped::Raise },
            max_new_tokens: Some(8),
            token_limit,
            max_event_bytes,
        },
    )
}

/// A stream and the dialect to parse it as, in some cases the wrong one.
pub fn streams() -> impl Strategy<Value = (Dialect, Vec<u8>)> {
    let spoken = prop_oneof![
        sglang::streams().prop_map(|body| (Dialect::Sglang, body)),
        vllm::streams(false).prop_map(|body| (Dialect::Vllm, body)),
        vllm::streams(true).prop_map(|body| (Dialect::VllmCompletions, body)),
    ];
    let others = prop::option::weighted(0.2, prop::sample::select(Dialect::ALL.map(|(_, dialect)| dialect).to_vec()));
    (spoken, others).prop_map(|((dialect, body), other)| (other.unwrap_or(dialect), body))
}

/// What separates events.
pub fn endings() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\n: ping\n\n", "\nid: 7\n\n"])
}

/// Ids, and logprobs as text.
pub fn tokens() -> impl Strategy<Value = Vec<(i32, &'static str)>> {
    let logprobs = vec!["-0.5", "-0.25", "0.0", "-0.0", "-1e-05", "-9999.0", "-3.4028234663852886e+38"];
    prop::collection::vec((0..3_i32, prop::sample::select(logprobs)), 0..4)
}

/// Lists of the prompt's token ids, mostly equal ones in several spellings.
pub fn prompts() -> impl Strategy<Value = Vec<&'static str>> {
    let lists = vec!["[7,300,5]", "[7,300,5]", "[7, 300,5 ]", "null", "[7,300]"];
    prop::collection::vec(prop::sample::select(lists), 1..4)
}

/// Texts that are critical to split or to decode.
pub fn texts() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["a", "é", "\u{2028}", "😀", "\\n", "\\ud83d\\ude00", "data: [DONE]", ""])
}

/// A stream with a few bytes changed, inserted or removed.
pub fn damaged_streams() -> impl Strategy<Value = (Dialect, Vec<u8>)> {
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..4);
    (streams(), damage).prop_map(|((dialect, mut body), damage)| {
        for (place, byte, how) in damage {
            if body.is_empty() {
                break;
            }
            let place = place.index(body.len());
            match how {
                0 => body[place] = byte,
                1 => drop(body.remove(place)),
                2 => body.insert(place, byte),
                _ => body.truncate(place),
            }
        }
        (dialect, body)
    })
}
