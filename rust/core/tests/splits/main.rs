//! The result and the error do not depend on how the bytes are split.

#[path = "../common/mod.rs"]
mod common;
mod recorded;
mod sglang;
mod streams;
mod vllm;

use common::read;
use proptest::prelude::*;
use streamfold_core::{Dialect, Error, ErrorKind, Options, Parser};
use streams::{damaged_streams, options, split, streams};

/// What ends a string, or must not be in one, or is no byte of a character.
const SPECIALS: &[&str] = &["\"", "\\\"", "\\n", "\\", "\u{1}", "\n", "\ndata: ", "\r", "é", "\u{2028}"];

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
    fn any_split_of_a_long_string_gives_the_same(
        specials in prop::collection::vec((0..30_000_usize, prop::sample::select(SPECIALS)), 0..3),
        places in prop::collection::vec(any::<usize>(), 0..4), step in 4000..9000_usize,
    ) {
        // Long parts of a line are looked at before the line is whole.
        let mut text = vec![b'a'; 30_000];
        for (place, special) in specials {
            text.splice(place..place, special.bytes());
        }
        let meta = b"\",\"meta_info\":{\"completion_tokens\":1,\"output_token_logprobs\":[[-0.5,7,null]]}}\n\n";
        let event = [b"data: {\"text\":\"", &text[..], meta].concat();
        let body = [&event[..], b"data: [DONE]\n\n"].concat();
        let slow = read(body.chunks(1), Dialect::Sglang, Options::default());
        prop_assert_eq!(&slow, &read([&body[..]], Dialect::Sglang, Options::default()));
        prop_assert_eq!(&slow, &read(body.chunks(step), Dialect::Sglang, Options::default()));
        prop_assert_eq!(&slow, &read(split(&body, &places), Dialect::Sglang, Options::default()));
    }

    #[test]
    fn byte_by_byte_gives_the_same((dialect, body) in damaged_streams(), options in options()) {
        prop_assert_eq!(read([&body[..]], dialect, options), read(body.chunks(1), dialect, options));
    }

    #[test]
    fn a_snapshot_is_what_the_bytes_so_far_give_and_changes_nothing(
        (dialect, body) in damaged_streams(), options in options(), places in prop::collection::vec(any::<usize>(), 0..12),
    ) {
        let mut parser = Parser::new(dialect, options);
        let mut fed = 0;
        for part in split(&body, &places) {
            let failed = parser.feed(part).is_err();
            fed += part.len();
            let mut fresh = Parser::new(dialect, options);
            prop_assert_eq!(fresh.feed(&body[..fed]).is_err(), failed);
            let snapshot = parser.snapshot();
            prop_assert_eq!(&snapshot, &parser.snapshot());
            prop_assert_eq!(snapshot, fresh.take());
        }
        let error = parser.close(false).err();
        let whole = read([&body[..]], dialect, options);
        prop_assert_eq!((parser.take(), error), (whole.0, whole.1));
    }

    #[test]
    fn a_pause_is_behind_the_event_that_ends_the_generation(
        (dialect, body) in damaged_streams(), options in options(), places in prop::collection::vec(any::<usize>(), 0..4),
    ) {
        let mut slow = Parser::new(dialect, options);
        let end = body.iter().position(|byte| slow.feed(&[*byte]).is_err() || slow.finished());
        let end = end.map_or(body.len(), |last| last + 1);
        let mut parser = Parser::new(dialect, options);
        let mut taken = 0;
        for part in split(&body, &places) {
            let (count, result) = parser.feed_until_finished(part);
            taken += count;
            if count < part.len() || result.is_err() || parser.finished() {
                break;
            }
        }
        // An event that is too large is found out before its end: the rest of the read is then not taken either way.
        prop_assume!(!matches!(parser.feed(b""), Err(Error::Parse(ref error)) if error.kind == ErrorKind::TooLarge));
        prop_assert_eq!(taken, end);
        let rest = parser.feed_until_finished(&body[end..]);
        prop_assert!(rest == (body.len() - end, Ok(())) || rest.1.is_err());
        let error = rest.1.err().or_else(|| parser.close(false).err());
        let whole = read([&body[..]], dialect, options);
        prop_assert_eq!((parser.token_count(), error, parser.take()), (whole.2, whole.1, whole.0));
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
