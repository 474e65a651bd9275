//! `cargo bench`: this parser and others, from the bytes of a body to arrays.

use std::sync::LazyLock;

use divan::Bencher;
use divan::counter::BytesCount;
use parsers::streams::{sglang, vllm};
use parsers::ways::{
    Arrays, Way, jiter_sglang, jiter_vllm, serde_json_sglang, serde_json_vllm, simd_json_sglang, simd_json_vllm,
    sonic_sglang, sonic_vllm, streamfold,
};
use streamfold_core::Dialect;

type Body = LazyLock<Vec<u8>>;

static SGLANG_20: Body = LazyLock::new(|| sglang(500_000, 20));
static SGLANG_1: Body = LazyLock::new(|| sglang(100_000, 1));
static VLLM_20: Body = LazyLock::new(|| vllm(200_000, 20));
static VLLM_1: Body = LazyLock::new(|| vllm(50_000, 1));

fn streamfold_sglang(body: &[u8]) -> Arrays {
    streamfold(Dialect::Sglang, body)
}

fn streamfold_vllm(body: &[u8]) -> Arrays {
    streamfold(Dialect::Vllm, body)
}

const SGLANG: [(&str, Way); 5] = [
    ("streamfold", streamfold_sglang),
    ("simd-json tape", simd_json_sglang),
    ("sonic-rs typed", sonic_sglang),
    ("serde_json typed", serde_json_sglang),
    ("jiter value", jiter_sglang),
];
const VLLM: [(&str, Way); 5] = [
    ("streamfold", streamfold_vllm),
    ("simd-json tape", simd_json_vllm),
    ("sonic-rs typed", sonic_vllm),
    ("serde_json typed", serde_json_vllm),
    ("jiter value", jiter_vllm),
];

fn run(bencher: Bencher, body: &[u8], ways: &[(&str, Way)], name: &str) {
    let (_, way) = ways.iter().find(|(other, _)| *other == name).expect("a way");
    bencher.counter(BytesCount::of_slice(body)).bench(|| way(divan::black_box(body)));
}

#[divan::bench(args = SGLANG.map(|(name, _)| name), sample_count = 15, sample_size = 1)]
fn sglang_20_tokens_an_event(bencher: Bencher, name: &str) {
    run(bencher, &SGLANG_20, &SGLANG, name);
}

#[divan::bench(args = SGLANG.map(|(name, _)| name), sample_count = 15, sample_size = 1)]
fn sglang_1_token_an_event(bencher: Bencher, name: &str) {
    run(bencher, &SGLANG_1, &SGLANG, name);
}

#[divan::bench(args = VLLM.map(|(name, _)| name), sample_count = 15, sample_size = 1)]
fn vllm_20_tokens_an_event(bencher: Bencher, name: &str) {
    run(bencher, &VLLM_20, &VLLM, name);
}

#[divan::bench(args = VLLM.map(|(name, _)| name), sample_count = 15, sample_size = 1)]
fn vllm_1_token_an_event(bencher: Bencher, name: &str) {
    run(bencher, &VLLM_1, &VLLM, name);
}

fn main() {
    let same = |body: &[u8], ways: &[(&str, Way)]| {
        let expected = ways[0].1(body);
        for (name, way) in ways {
            assert!(way(body) == expected, "{name} gives other arrays");
        }
    };
    same(&SGLANG_20, &SGLANG);
    same(&SGLANG_1, &SGLANG);
    same(&VLLM_20, &VLLM);
    same(&VLLM_1, &VLLM);
    divan::main();
}
