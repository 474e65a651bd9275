//! However the bytes of a reply are split into reads, the same comes of them; and it is what the twin says.

use proptest::prelude::*;
use streamfold_io::{Event, Failure, Input, ProtocolError, State};

use crate::drive::{ALERT, Outcome, Tail, put, read, sent, stream};
use crate::scripts::{damaged_replies, replies, split};
use crate::twin;

fn tails() -> impl Strategy<Value = Tail> {
    prop::sample::select(vec![Tail::Open, Tail::Eof, Tail::Reset, Tail::TlsFailed])
}

fn limits() -> impl Strategy<Value = Option<usize>> {
    prop::option::of(prop::sample::select(vec![0, 3, 100]))
}

fn places() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<usize>(), 0..12)
}

/// The outcome without httparse's own words.
fn plain(mut outcome: Outcome) -> Outcome {
    for event in &mut outcome.events {
        if let Event::Failed { failure: Failure::Protocol(ProtocolError::HeadSyntax(what)), .. } = event {
            *what = "";
        }
    }
    outcome
}

proptest! {
    #[test]
    fn the_exchange_agrees_with_the_twin(
        bytes in replies(), tail in tails(), limit in limits(), places in places(),
    ) {
        let twin = twin::read(&bytes, tail, stream(limit));
        prop_assert_eq!(&plain(read([&bytes[..]], tail, stream(limit), false)), &twin);
        prop_assert_eq!(&plain(read(split(&bytes, &places), tail, stream(limit), false)), &twin);
    }

    #[test]
    fn any_split_of_a_damaged_reply_gives_the_same(
        bytes in damaged_replies(), tail in tails(), limit in limits(), places in places(), is_aborted in any::<bool>(),
    ) {
        let whole = read([&bytes[..]], tail, stream(limit), is_aborted);
        prop_assert_eq!(&whole, &read(split(&bytes, &places), tail, stream(limit), is_aborted));
        prop_assert_eq!(&whole, &read(bytes.chunks(1), tail, stream(limit), is_aborted));
        if is_aborted {
            let is_error = |event: &Event| matches!(event, Event::DecodeError(_) | Event::Failed { .. });
            prop_assert!(!whole.events.iter().any(is_error), "nothing goes wrong after an abort");
            prop_assert!(![State::Done { reusable: true }, State::Failed].contains(&whole.state), "{:?}", whole.state);
        }
    }

    #[test]
    fn closed_is_absorbing(bytes in damaged_replies(), place in any::<prop::sample::Index>(), limit in limits()) {
        let (before, after) = bytes.split_at(place.index(bytes.len() + 1));
        let mut exchange = sent(stream(limit));
        put(&mut exchange, Input::Received(before));
        prop_assert_eq!(put(&mut exchange, Input::Close), []);
        let tokens = exchange.token_count();
        let inputs = [
            Input::Received(after), Input::Sent(1), Input::Connected, Input::Send, Input::ConnectFailed(111),
            Input::SendFailed(32), Input::Abort, Input::Eof, Input::Reset(104), Input::TlsFailed(ALERT), Input::Close,
        ];
        for input in inputs {
            prop_assert_eq!(put(&mut exchange, input), []);
            prop_assert_eq!(exchange.state(), State::Closed);
        }
        prop_assert_eq!(exchange.unsent().concat(), b"");
        prop_assert_eq!(exchange.token_count(), tokens);
        prop_assert_eq!(exchange.take().token_ids.len(), tokens);
    }
}
