//! Streams as SGLang writes them, sound and damaged, and ways to cut them.

use proptest::prelude::*;
use streamfold_core::{Clamped, Dialect, Dtype, Experts, Options};

/// Cut `body` at each of `cuts`, taken modulo its length.
pub fn cut<'a>(body: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = cuts.iter().map(|place| place % (body.len() + 1)).collect();
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
    (any::<bool>(), experts, prop::option::of(0..5_u64), any::<bool>(), prop_oneof![Just(1 << 30), 20..400_usize])
        .prop_map(|(logprobs, experts, prompt_len, keep, max_event_bytes)| Options {
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
            max_event_bytes,
        })
}

pub fn dialects() -> impl Strategy<Value = Dialect> {
    prop::sample::select(Dialect::ALL.map(|(_, dialect)| dialect).to_vec())
}

/// A stream as SGLang writes it: what each event brings, and how.
pub fn streams() -> impl Strategy<Value = Vec<u8>> {
    let token =
        (0..3_i32, prop::sample::select(vec!["-0.5", "-0.25", "0.0", "-0.0", "-1e-05", "-3.4028234663852886e+38"]));
    let texts = prop::sample::select(vec!["a", "é", "\u{2028}", "😀", "\\n", "\\ud83d\\ude00", "data: [DONE]", ""]);
    let event = (prop::collection::vec(token, 0..4), texts);
    let endings = prop::sample::select(vec!["\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\n: ping\n\n", "\nid: 7\n\n"]);
    let finishes = prop::sample::select(vec![
        r#"{"type":"stop","matched":2}"#,
        r#"{"type":"length","length":3}"#,
        r#"{"type":"abort","message":"Aborted"}"#,
        r#"{"type":"abort","message":"full","status_code":503}"#,
        "null",
    ]);
    (prop::collection::vec((event, endings), 0..6), any::<bool>(), finishes, any::<bool>()).prop_map(
        |(events, cumulative, finish, has_bom)| {
            let mut body = if has_bom { "\u{feff}".to_owned() } else { String::new() };
            let (mut ids, mut pairs, mut text) = (Vec::new(), Vec::new(), String::new());
            let count = events.len();
            for (index, ((tokens, piece), ending)) in events.into_iter().enumerate() {
                let first = if cumulative { 0 } else { ids.len() };
                for (id, logprob) in tokens {
                    ids.push(id.to_string());
                    pairs.push(format!("[{logprob},{id},null]"));
                }
                text = if cumulative { text + piece } else { piece.to_owned() };
                let finish = if index + 1 == count { finish } else { "null" };
                let total = ids.len();
                let event = format!(
                    "data: {{\"text\":\"{text}\",\"output_ids\":[{}],\"meta_info\":{{\"id\":\"r\",\"finish_reason\":{finish},\
                     \"prompt_tokens\":3,\"weight_version\":\"v{index}\",\"output_token_logprobs\":[{}],\
                     \"output_token_logprobs_length\":{total},\"completion_tokens\":{total}}}}}{ending}",
                    ids[first..].join(","),
                    pairs[first..].join(","),
                );
                body += &event;
            }
            (body + "data: [DONE]\n\n").into_bytes()
        },
    )
}

/// A stream with a few bytes changed, doubled or left out.
pub fn damaged_streams() -> impl Strategy<Value = Vec<u8>> {
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..4);
    (streams(), damage).prop_map(|(mut body, damage)| {
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
        body
    })
}
