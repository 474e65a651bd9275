//! Reads one fixed stream, under a profiler or an instruction counter: `fixed STREAM [TURNS]`.

use std::sync::Arc;

use parsers::streams::{READ, chunked, cumulative, sglang, vllm};
use parsers::ways::streamfold;
use streamfold_core::{Dialect, Options};
use streamfold_io::{Exchange, Expected, Input, Method, Request, RequestHead};

const TOKENS: usize = 20_000;
/// Each event has all tokens so far, and an instruction counter is slow to make them.
const CUMULATIVE_TOKENS: usize = 2_000;

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let turns = std::env::args().nth(2).map_or(1, |turns| turns.parse().expect("a number of turns"));
    let dialect = match name.split('-').next() {
        Some("vllm") => Dialect::Vllm,
        Some("cumulative") => Dialect::SglangCumulative,
        _ => Dialect::SglangIncremental,
    };
    let body = match name.as_str() {
        "sglang-20" => sglang(TOKENS, 20),
        "sglang-1" => sglang(TOKENS, 1),
        "cumulative-20" => cumulative(CUMULATIVE_TOKENS, 20),
        "vllm-20" => vllm(TOKENS, 20),
        "vllm-1" => vllm(TOKENS, 1),
        "chunked-1" => chunked(&sglang(TOKENS, 1)),
        other => panic!("no stream {other:?}"),
    };
    let tokens = if name == "cumulative-20" { CUMULATIVE_TOKENS } else { TOKENS };
    for _ in 0..turns {
        assert_eq!(fold(dialect, &body, name == "chunked-1"), tokens);
    }
}

/// Only what happens in here is counted.
#[inline(never)]
fn fold(dialect: Dialect, body: &[u8], is_reply: bool) -> usize {
    if is_reply { exchange(dialect, body) } else { streamfold(dialect, body).token_ids.len() }
}

/// Read a whole reply with its head.
fn exchange(dialect: Dialect, reply: &[u8]) -> usize {
    let head = RequestHead::new(Method::Post, "/generate", "engine").expect("sound");
    let expected = Expected::Stream { dialect, options: Options::default() };
    let mut exchange = Exchange::new(Request::new(head, Arc::new([])), expected);
    let mut events = Vec::new();
    for input in [Input::Connected, Input::Send, Input::Sent(usize::MAX)] {
        exchange.handle(input, &mut events);
    }
    for read in reply.chunks(READ) {
        exchange.handle(Input::Received(read), &mut events);
    }
    exchange.take().token_ids.len()
}
