//! Fixed streams, and ways to turn them into arrays: this parser and other JSON parsers.

mod random;
pub mod streams;
pub mod ways;
