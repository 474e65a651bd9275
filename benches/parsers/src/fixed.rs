//! Reads one fixed stream once, under a profiler or an instruction counter: `fixed sglang-20|sglang-1|vllm-1`.

use parsers::streams::{sglang, vllm};
use parsers::ways::streamfold;
use streamfold_core::Dialect;

const TOKENS: usize = 20_000;

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let turns = std::env::args().nth(2).map_or(1, |turns| turns.parse().expect("a number of turns"));
    let (dialect, body) = match name.as_str() {
        "sglang-20" => (Dialect::SglangIncremental, sglang(TOKENS, 20)),
        "sglang-1" => (Dialect::SglangIncremental, sglang(TOKENS, 1)),
        "vllm-1" => (Dialect::Vllm, vllm(TOKENS, 1)),
        "vllm-20" => (Dialect::Vllm, vllm(TOKENS, 20)),
        other => panic!("no stream {other:?}"),
    };
    for _ in 0..turns {
        assert_eq!(fold(dialect, &body), TOKENS);
    }
}

/// Counted: only what happens in here.
#[inline(never)]
fn fold(dialect: Dialect, body: &[u8]) -> usize {
    streamfold(dialect, body).token_ids.len()
}
