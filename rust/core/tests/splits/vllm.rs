//! Streams as vLLM writes them.

use proptest::prelude::*;

use crate::streams::{endings, prompts, texts, tokens};

/// How a vLLM stream ends, and in which form it is written.
#[derive(Clone, Copy, Debug)]
struct Spelling {
    finish: &'static str,
    has_numbers: bool,
    has_text: bool,
    has_masks: bool,
}

fn spellings() -> impl Strategy<Value = Spelling> {
    let finishes = prop::sample::select(vec![
        r#""finish_reason":"stop","stop_reason":2"#,
        r#""finish_reason":"length","stop_reason":null"#,
        r#""finish_reason":"abort""#,
        r#""finish_reason":"repetition","stop_reason":"repetition_detected""#,
        r#""finish_reason":null"#,
    ]);
    (finishes, any::<[bool; 3]>()).prop_map(|(finish, [has_numbers, has_text, has_masks])| Spelling {
        finish,
        has_numbers,
        has_text,
        has_masks,
    })
}

/// A stream of vLLM's token endpoint, or of its completions.
pub fn streams(is_completions: bool) -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec(((tokens(), texts()), endings()), 0..6), spellings(), any::<bool>(), prompts()).prop_map(
        move |(events, spelling, has_usage, prompts)| {
            let (mut parts, mut total, count) = (Vec::new(), 0, events.len());
            for (index, ((tokens, piece), ending)) in events.into_iter().enumerate() {
                total += tokens.len();
                let finish = if index + 1 == count { spelling.finish } else { "\"finish_reason\":null" };
                let prompt = format!("\"prompt_token_ids\":{},", prompts[index % prompts.len()]);
                let (of_event, of_choice) = if is_completions { ("", prompt.as_str()) } else { (prompt.as_str(), "") };
                let choice = choice(&tokens, piece, finish, spelling, is_completions);
                let usage = if has_usage { usage(total) } else { "null".to_owned() };
                parts.push(format!(
                    "data: {{\"request_id\":\"r\",\"id\":\"r\",\"usage\":{usage},\"weight_version\":\"v{index}\",\
                 {of_event}\"choices\":[{{{of_choice}{choice}}}]}}{ending}"
                ));
            }
            parts.push(format!("data: {{\"request_id\":\"r\",\"choices\":[],\"usage\":{}}}\n\n", usage(total)));
            parts.push("data: [DONE]\n\n".to_owned());
            parts.concat().into_bytes()
        },
    )
}

fn usage(total: usize) -> String {
    format!("{{\"prompt_tokens\":3,\"completion_tokens\":{total},\"prompt_tokens_details\":{{\"cached_tokens\":1}}}}")
}

fn choice(tokens: &[(i32, &str)], piece: &str, finish: &str, spelling: Spelling, is_completions: bool) -> String {
    let ids = joined(tokens, |id, _| id.to_string());
    let logprobs = if is_completions {
        let names = joined(tokens, |id, _| format!("\"token_id:{id}\""));
        format!("{{\"token_logprobs\":[{}],\"tokens\":[{names}]}}", joined(tokens, |_, logprob| logprob.to_owned()))
    } else {
        let entries = joined(tokens, |id, logprob| {
            let likely = if spelling.has_numbers {
                format!("\"token_id\":{id},\"logprob\":{logprob},\"rank\":1")
            } else {
                format!("\"token\":\"token_id:{id}\",\"logprob\":{logprob},\"bytes\":null")
            };
            format!("{{{likely},\"top_logprobs\":[{{{likely}}}]}}")
        });
        format!("{{\"content\":[{entries}]}}")
    };
    let text = if spelling.has_text { format!("\"text\":\"{piece}\",") } else { String::new() };
    let masks = if spelling.has_masks { joined(tokens, |id, _| format!("[{id},7]")) } else { String::new() };
    let masks = if spelling.has_masks { format!("[{masks}]") } else { "null".to_owned() };
    format!("\"index\":0,{text}{finish},\"token_ids\":[{ids}],\"sampling_mask\":{masks},\"logprobs\":{logprobs}")
}

fn joined(tokens: &[(i32, &str)], write: impl Fn(i32, &str) -> String) -> String {
    tokens.iter().map(|&(id, logprob)| write(id, logprob)).collect::<Vec<_>>().join(",")
}
