//! Streams as SGLang writes them.

use proptest::prelude::*;

use crate::streams::{endings, prompts, texts, tokens};

/// A stream as SGLang writes it.
pub fn streams() -> impl Strategy<Value = Vec<u8>> {
    let finishes = prop::sample::select(vec![
        r#"{"type":"stop","matched":2}"#,
        r#"{"type":"length","length":3}"#,
        r#"{"type":"abort","message":"Aborted"}"#,
        r#"{"type":"abort","message":"full","status_code":503}"#,
        "null",
    ]);
    (prop::collection::vec(((tokens(), texts()), endings()), 0..6), any::<bool>(), finishes, any::<bool>(), prompts()).prop_map(
        |(events, cumulative, finish, has_bom, prompts)| {
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
                     \"output_token_logprobs_length\":{total},\"completion_tokens\":{total}}},\"prompt_token_ids\":{}}}{ending}",
                    ids[first..].join(","),
                    pairs[first..].join(","),
                    prompts[index % prompts.len()],
                );
                body += &event;
            }
            (body + "data: [DONE]\n\n").into_bytes()
        },
    )
}
