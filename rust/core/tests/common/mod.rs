//! The complete outcome of parsing a stream.

use streamfold_core::{Dialect, Error, Generation, Options, Parser};

/// The generation, the error, and the counters.
pub type Outcome = (Generation, Option<Error>, usize, [bool; 3]);

/// Parse a stream given in parts.
pub fn read<'a>(parts: impl IntoIterator<Item = &'a [u8]>, dialect: Dialect, options: Options) -> Outcome {
    let mut parser = Parser::new(dialect, options);
    let mut error = None;
    for part in parts {
        if let Err(failure) = parser.feed(part) {
            error = Some(failure);
            break;
        }
    }
    let error = error.or_else(|| parser.close(false).err());
    let (count, flags) = (parser.token_count(), [parser.finished(), parser.overrun(), parser.done()]);
    (parser.take(), error, count, flags)
}
