//! However the same bytes are cut, the result and the error are the same.

#[path = "../common/mod.rs"]
mod common;
mod recorded;
mod sglang;
mod streams;
mod vllm;

use common::read;
use proptest::prelude::*;
use streamfold_core::{Error, Parser};
use streams::{cut, damaged_streams, options, streams};

proptest! {
    #[test]
    fn any_cut_of_a_sound_stream_gives_the_same(
        (dialect, body) in streams(), options in options(), cuts in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(cut(&body, &cuts), dialect, options));
    }

    #[test]
    fn any_cut_of_a_damaged_stream_gives_the_same(
        (dialect, body) in damaged_streams(), options in options(), cuts in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(cut(&body, &cuts), dialect, options));
    }

    #[test]
    fn byte_by_byte_gives_the_same((dialect, body) in damaged_streams(), options in options()) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(body.chunks(1), dialect, options));
    }

    #[test]
    fn an_event_applies_whole_or_not_at_all((dialect, body) in damaged_streams(), options in options()) {
        // What is taken after an error is what the bytes before the bad event give.
        let mut parser = Parser::new(dialect, options);
        let Some((bad, error)) = body.iter().enumerate().find_map(|(place, byte)| Some((place, parser.feed(&[*byte]).err()?)))
        else {
            return Ok(());
        };
        // An engine that breaks may tell its last tokens in the same breath.
        prop_assume!(!matches!(error, Error::Engine(_)));
        let mut clean = Parser::new(dialect, options);
        clean.feed(&body[..bad]).expect("these bytes were good");
        prop_assert_eq!(parser.take(), clean.take());
    }
}
