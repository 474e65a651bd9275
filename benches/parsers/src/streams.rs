//! Bodies as SGLang and vLLM write them, of the same form as those of `benches/streams.py`.

use std::fmt::Write;

use crate::random::Random;

/// A socket gives this many bytes with one read.
pub const READ: usize = 64 << 10;

const WORDS: [&str; 24] = [
    "Let",
    " us",
    " consider",
    " the",
    " remainder",
    " of",
    " product",
    " modulo",
    " 7",
    ".",
    "\\n",
    " It",
    " divides",
    " both",
    " sides",
    ",",
    " so",
    " there",
    " is",
    " an",
    " integer",
    " k",
    " \\\"whole\\\"",
    "\\\\",
];

struct Token {
    id: usize,
    logprob: String,
    rank: usize,
    word: &'static str,
}

/// Ids are log-uniform up to 151,643 (Zipf's law). Logprobs are log-uniform too, float32 widened to float64.
fn sampled(count: usize) -> Vec<Token> {
    let mut random = Random::new(20);
    let token = |_| {
        let logprob = (-(10_f64.powf(random.unit() * 6.5 - 6.0))).to_string().parse::<f32>().map_or(0.0, f64::from);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "10 … 151,643")]
        let id = (10.0 * 15_164.3_f64.powf(random.unit())) as usize;
        let rank = 1 + usize::from(random.below(10) < 3) * (1 + random.below(4));
        let logprob = ryu::Buffer::new().format_finite(logprob).to_owned();
        Token { id, logprob, rank, word: WORDS[random.below(WORDS.len())] }
    };
    (0..count).map(token).collect()
}

fn joined<'a>(tokens: &'a [Token], write: impl Fn(&'a Token) -> String) -> String {
    tokens.iter().map(write).collect::<Vec<_>>().join(",")
}

/// The body of an incremental SGLang stream.
#[must_use]
pub fn sglang(count: usize, per_event: usize) -> Vec<u8> {
    sglang_body(count, per_event, |so_far, new| &so_far[so_far.len() - new..])
}

/// The body of a cumulative SGLang stream: each event has all tokens so far.
#[must_use]
pub fn cumulative(count: usize, per_event: usize) -> Vec<u8> {
    sglang_body(count, per_event, |so_far, _| so_far)
}

fn sglang_body(count: usize, per_event: usize, shown: impl Fn(&[Token], usize) -> &[Token]) -> Vec<u8> {
    let tokens = sampled(count);
    let mut body = String::new();
    let mut end = 0;
    for new in tokens.chunks(per_event) {
        let is_first = end == 0;
        end += new.len();
        let shown = shown(&tokens[..end], new.len());
        let is_last = end == count;
        let finish = if is_last { format!("{{\"type\":\"length\",\"length\":{count}}}") } else { "null".to_owned() };
        let text: String = shown.iter().map(|token| token.word).collect();
        let ids = joined(shown, |token| token.id.to_string());
        let pairs = joined(shown, |token| format!("[{},{},null]", token.logprob, token.id));
        let versions = format!(",\"weight_versions\":[{{\"version\":\"default\",\"start\":0,\"end\":{count}}}]");
        let versions = if is_last { versions.as_str() } else { "" };
        let sent = if is_first { ",\"response_sent_to_client_ts\":1795951942.4590852" } else { "" };
        let latency = if is_last { ",\"e2e_latency\":374.3338000001586" } else { "" };
        write!(
            body,
            "data: {{\"text\":\"{text}\",\"output_ids\":[{ids}],\"meta_info\":{{\
             \"id\":\"7cdb173d6c36484cb237fa2951313c1f\",\"finish_reason\":{finish},\"prompt_tokens\":512,\
             \"weight_version\":\"default\",\"num_retractions\":0,\"input_token_logprobs\":[],\
             \"output_token_logprobs\":[{pairs}],\"output_token_logprobs_length\":{end},\"reasoning_tokens\":0,\
             \"completion_tokens\":{end},\"cached_tokens\":0{versions},\"cached_tokens_details\":null,\
             \"dp_rank\":null{sent}{latency}}}}}\n\n"
        )
        .expect("a string takes all");
    }
    body.push_str("data: [DONE]\n\n");
    body.into_bytes()
}

/// The body of a stream of vLLM's token endpoint.
#[must_use]
pub fn vllm(count: usize, per_event: usize) -> Vec<u8> {
    let tokens = sampled(count);
    let outer = "\"request_id\":\"generate-tokens-7cdb173d6c36484cb237fa2951313c1f\"";
    let mut body = String::new();
    let mut end = 0;
    let usage = |end: usize, details: &str| {
        format!(
            "\"usage\":{{\"prompt_tokens\":512,\"total_tokens\":{},\"completion_tokens\":{end},\
             \"prompt_tokens_details\":{details}",
            512 + end
        )
    };
    for new in tokens.chunks(per_event) {
        end += new.len();
        let is_last = end == count;
        let finish = if is_last { "\"length\"" } else { "null" };
        let versions = format!("[{{\"version\":\"default\",\"start\":0,\"end\":{count}}}]");
        let versions = if is_last { versions.as_str() } else { "null" };
        let ids = joined(new, |token| token.id.to_string());
        let entries = joined(new, |token| {
            let likely = format!("\"token_id\":{},\"logprob\":{},\"rank\":{}", token.id, token.logprob, token.rank);
            format!("{{{likely},\"top_logprobs\":[{{{likely}}}]}}")
        });
        write!(
            body,
            "data: {{{outer},{},\"completion_tokens_details\":null}},\"output_mode\":\"tokens\",\"choices\":[{{\
             \"index\":0,\"finish_reason\":{finish},\"stop_reason\":null,\"token_ids\":[{ids}],\
             \"routed_experts\":null,\"sampling_mask\":null,\"weight_versions\":{versions},\
             \"logprobs\":{{\"content\":[{entries}]}}}}]}}\n\n",
            usage(end, "null")
        )
        .expect("a string takes all");
    }
    let last = usage(end, "{\"cached_tokens\":0}");
    write!(body, "data: {{{outer},{last}}},\"output_mode\":\"tokens\",\"choices\":[]}}\n\ndata: [DONE]\n\n")
        .expect("a string takes all");
    body.into_bytes()
}

/// A reply with this body, each event in a chunk of its own, as uvicorn sends it.
#[must_use]
pub fn chunked(body: &[u8]) -> Vec<u8> {
    let mut reply =
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    let mut start = 0;
    for end in memchr::memmem::find_iter(body, b"\n\n").map(|end| end + 2) {
        reply.extend_from_slice(format!("{:x}\r\n", end - start).as_bytes());
        reply.extend_from_slice(&body[start..end]);
        reply.extend_from_slice(b"\r\n");
        start = end;
    }
    reply.extend_from_slice(b"0\r\n\r\n");
    reply
}
