//! The result and the error do not depend on how the bytes are split.

#[path = "../common/mod.rs"]
mod common;
mod recorded;
mod sglang;
mod streams;
mod vllm;

use common::read;
use proptest::prelude::*;
use streamfold_core::{Error, Parser};
use streams::{damaged_streams, options, split, streams};

proptest! {
    #[test]
    fn any_split_of_a_valid_stream_gives_the_same(
        (dialect, body) in streams(), options in options(), places in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(split(&body, &places), dialect, options));
    }

    #[test]
    fn any_split_of_a_damaged_stream_gives_the_same(
        (dialect, body) in damaged_streams(), options in options(), places in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(split(&body, &places), dialect, options));
    }

    #[test]
    fn byte_by_byte_gives_the_same((dialect, body) in damaged_streams(), options in options()) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(body.chunks(1), dialect, options));
    }

    #[test]
    fn events_are_applied_atomically((dialect, body) in damaged_streams(), options in options()) {
        // After an error the generation is that of the bytes before the bad event.
        let mut parser = Parser::new(dialect, options);
        let Some((bad, error)) = body.iter().enumerate().find_map(|(place, byte)| Some((place, parser.feed(&[*byte]).err()?)))
        else {
            return Ok(());
        };
        // An engine error may come with the last tokens.
        prop_assume!(!matches!(error, Error::Engine(_)));
        let mut clean = Parser::new(dialect, options);
        clean.feed(&body[..bad]).expect("these bytes were good");
        prop_assert_eq!(parser.take(), clean.take());
    }
}
