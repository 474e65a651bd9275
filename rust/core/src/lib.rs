//! Folds the raw bytes of a streamed LLM generation into arrays.
//!
//! Bytes come in as they come from the socket, cut anywhere: [`Parser::feed`] reads server-sent events, checks each
//! one against everything before it, and appends its tokens. [`Parser::take`] gives the [`Generation`]. There is no
//! IO here, no clock, no thread, no Python.
//!
//! If anything in here panics, whatever the bytes, that is a bug: the fuzz targets hold it to that.

#![forbid(unsafe_code)]

mod arrays;
mod builder;
mod checks;
mod engine_error;
mod error;
mod field;
mod generation;
mod json;
mod key_cache;
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
