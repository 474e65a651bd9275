//! Ways from the bytes of a body to arrays. Each gives the same arrays.
//!
//! The other parsers are used as their own documentation says is fastest, get the whole body at once, and check nothing
//! but that it is JSON: the ids beside the pairs, counts, versions and all other keys are left out.

mod jiter_value;
mod simd_json_tape;
mod typed;

pub use jiter_value::{jiter_sglang, jiter_vllm};
pub use simd_json_tape::{simd_json_sglang, simd_json_vllm};
use streamfold_core::{Dialect, Options, Parser};
pub use typed::{serde_json_sglang, serde_json_vllm, sonic_sglang, sonic_vllm};

use crate::streams::READ;

/// What a trainer needs of a stream.
#[derive(Debug, Default, PartialEq)]
pub struct Arrays {
    /// The sampled tokens.
    pub token_ids: Vec<i32>,
    /// One for each token.
    pub logprobs: Vec<f64>,
    /// Empty if the engine sends none.
    pub text: String,
}

/// A way from a body to arrays.
pub type Way = fn(&[u8]) -> Arrays;

/// This parser, fed as a socket would; SGLang's mode is detected.
///
/// # Panics
///
/// If the stream is not sound.
#[must_use]
pub fn streamfold(dialect: Dialect, body: &[u8]) -> Arrays {
    let mut parser = Parser::new(dialect, Options::default());
    for read in body.chunks(READ) {
        parser.feed(read).expect("sound");
    }
    parser.close(false).expect("complete");
    let generation = parser.take();
    Arrays {
        token_ids: generation.token_ids,
        logprobs: generation.logprobs.unwrap_or_default(),
        text: generation.text.unwrap_or_default(),
    }
}

/// The data of each event but `[DONE]`.
fn events(body: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut start = 0;
    memchr::memmem::find_iter(body, b"\n\n").filter_map(move |end| {
        let event = &body[start..end];
        start = end + 2;
        event.strip_prefix(b"data: ").filter(|data| *data != b"[DONE]")
    })
}
