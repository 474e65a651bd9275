//! Parses streamed LLM generations (server-sent events of SGLang and vLLM) into arrays.
//!
//! [`Parser::feed`] takes the bytes of the response body as the socket delivers them, split at any byte. It parses the
//! events, checks each one against the tokens before it, and appends its tokens. [`Parser::take`] returns the
//! [`Generation`]: token ids, logprobs, text and side data. The crate does no IO, and uses no clock, thread or Python.
//!
//! No input may make it panic. The fuzz targets check that.

#![forbid(unsafe_code)]

mod arrays;
mod builder;
mod checks;
mod engine_error;
mod error;
mod experts;
mod field;
mod generation;
mod json;
mod key_cache;
mod key_table;
mod memory;
mod meta;
mod npy;
mod number;
mod options;
mod parser;
mod prefix;
mod prompt_ids;
mod sglang;
mod side;
mod span;
mod sse;
mod text;
mod vllm;

pub use error::{EngineError, Error, ErrorKind, ParseError};
pub use generation::{FinishReason, Generation, Matched, RoutedExperts, TopP, VersionSpan};
pub use options::{Clamped, Dialect, Dtype, Experts, Options};
pub use parser::Parser;
