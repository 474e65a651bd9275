//! How exchanges end: by their reply, by an abort, by `take`, by what the engine reports.

use streamfold_core::{Dialect, Error, FinishReason, Options};
use streamfold_io::{Event, Expected, Input, State};

use crate::drive::{ALERT, Tail, chunked, names, put, read, sent, stream};
use crate::streams::{event, short};

#[test]
fn a_stream_brings_four_events_however_long_it_is() {
    let events: Vec<_> = (0..1000).map(|index| event(index, 1, (index == 999).then_some("stop")) + "\n\n").collect();
    let outcome = read([&chunked(events.concat().as_bytes())[..]], Tail::Open, stream(None), false);
    assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "reusable"]);
    assert_eq!(outcome.generation.token_ids.len(), 1000);
    assert_eq!(outcome.generation.finish_reason, Some(FinishReason::Stop));
}

#[test]
fn each_state_of_a_stream_shows() {
    let mut exchange = sent(stream(None));
    let (bytes, body) = (chunked(short().as_bytes()), short());
    let body_start = bytes.len() - body.len() - b"\r\n0\r\n\r\n".len();
    let event_ends: Vec<_> = body.match_indices("\n\n").map(|(index, _)| body_start + index + 2).collect();
    let steps = [
        (body_start, State::Waiting),
        (event_ends[0], State::Streaming),
        (event_ends[1], State::Rest),
        (bytes.len() - 1, State::Rest),
        (bytes.len(), State::Done { reusable: true }),
    ];
    let mut start = 0;
    for (end, state) in steps {
        put(&mut exchange, Input::Received(&bytes[start..end]));
        assert_eq!(exchange.state(), state);
        start = end;
    }
    put(&mut exchange, Input::Received(b"\r\n"));
    assert_eq!(exchange.state(), State::Done { reusable: false }, "a byte behind the reply");
}

#[test]
fn a_kept_connection_that_ends_is_not_reusable() {
    for input in [Input::Eof, Input::Reset(104), Input::TlsFailed(ALERT)] {
        let mut exchange = sent(stream(None));
        put(&mut exchange, Input::Received(b"HTTP/1.1 204 No Content\r\n\r\n"));
        assert_eq!(exchange.state(), State::Done { reusable: true });
        assert_eq!(put(&mut exchange, input), []);
        assert_eq!(exchange.state(), State::Done { reusable: false });
    }
}

#[test]
fn the_usage_that_follows_the_terminal_event_is_kept() {
    let choice = r#"{"request_id":"r","choices":[{"index":0,"token_ids":[7],"finish_reason":"stop"}]}"#;
    let usage = r#"{"request_id":"r","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}"#;
    let body = format!("data: {choice}\n\ndata: {usage}\n\ndata: [DONE]\n\n");
    let options = Options { logprobs: false, ..Options::default() };
    let expected = Expected::Stream { dialect: Dialect::Vllm, options };
    let outcome = read([&chunked(body.as_bytes())[..]], Tail::Open, expected, false);
    assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "reusable"]);
    assert_eq!((outcome.generation.token_ids, outcome.generation.prompt_tokens), (vec![7], Some(5)));
}

#[test]
fn an_error_that_the_engine_reports_is_its_last_word() {
    let body = format!("{}\n\ndata: {{\"error\":{{\"message\":\"no memory\"}}}}\n\n{}", event(0, 1, None), short());
    let outcome = read([&chunked(body.as_bytes())[..]], Tail::Open, stream(None), false);
    assert_eq!(names(&outcome.events), ["head", "first_token", "decode_error", "reusable"]);
    assert!(matches!(&outcome.events[2], Event::DecodeError(Error::Engine(error)) if error.message == "no memory"));
    assert_eq!(outcome.generation.token_ids.len(), 1, "nothing is folded behind it");
}

#[test]
fn damage_ends_the_exchange() {
    let body = format!("{}\n\ndata: {{\n\n{}", event(0, 1, None), short());
    let outcome = read([&chunked(body.as_bytes())[..]], Tail::Open, stream(None), false);
    assert_eq!(names(&outcome.events), ["head", "first_token", "decode_error", "ended"]);
    assert_eq!((outcome.state, outcome.generation.token_ids.len()), (State::Failed, 1));
}

#[test]
fn a_stream_that_ends_too_early_is_truncated() {
    let bytes = chunked(format!("{}\n\n", event(0, 1, None)).as_bytes());
    let whole = read([&bytes[..]], Tail::Open, stream(None), false);
    assert_eq!(names(&whole.events), ["head", "first_token", "decode_error", "reusable"]);
    let broken = read([&bytes[..bytes.len() - 1]], Tail::Reset, stream(None), false);
    assert_eq!(names(&broken.events), ["head", "first_token", "failed", "decode_error", "ended"]);
    for outcome in [whole, broken] {
        let is_truncated = |event: &Event| matches!(event, Event::DecodeError(Error::Truncated { tokens: 1, .. }));
        assert!(outcome.events.iter().any(is_truncated));
    }
}

#[test]
fn a_connection_that_breaks_behind_the_terminal_event_does_no_harm() {
    let bytes = chunked(short().as_bytes());
    for tail in [Tail::Eof, Tail::Reset, Tail::TlsFailed] {
        let outcome = read([&bytes[..bytes.len() - 5]], tail, stream(None), false);
        assert_eq!(names(&outcome.events), ["head", "first_token", "finished", "ended"]);
        assert_eq!(outcome.state, State::Done { reusable: false });
    }
}

#[test]
fn after_an_abort_what_arrives_is_kept_and_the_connection_is_not() {
    let bytes = chunked(short().as_bytes());
    let whole = read([&bytes[..]], Tail::Open, stream(None), true);
    assert_eq!(names(&whole.events), ["head", "first_token", "finished", "ended"]);
    let middle = bytes.windows(2).position(|pair| pair == b"\n\n").expect("an event") + 2;
    let broken = read([&bytes[..middle]], Tail::Reset, stream(None), true);
    assert_eq!(names(&broken.events), ["head", "first_token", "ended"]);
    assert_eq!((broken.state, broken.generation.token_ids.len()), (State::Done { reusable: false }, 1));
    let unanswered = read([&b""[..]], Tail::Eof, stream(None), true);
    assert_eq!(names(&unanswered.events), ["ended"]);
}

#[test]
fn close_keeps_what_was_received() {
    let mut exchange = sent(stream(None));
    let bytes = chunked(format!("{}\n", event(0, 2, None)).as_bytes());
    put(&mut exchange, Input::Received(&bytes[..bytes.len() - 7]));
    assert_eq!((exchange.state(), exchange.token_count()), (State::Waiting, 0));
    assert_eq!(put(&mut exchange, Input::Close), []);
    assert_eq!(exchange.take().token_ids.len(), 2, "the event lacked only its blank line");
}

#[test]
fn take_works_in_any_state_and_stops_the_folding() {
    let bytes = chunked(short().as_bytes());
    for end in 0..=bytes.len() {
        let mut exchange = sent(stream(None));
        put(&mut exchange, Input::Received(&bytes[..end]));
        let is_past_the_last_event = matches!(exchange.state(), State::Rest | State::Done { .. });
        let generation = exchange.take();
        assert_eq!(generation.finish_reason.is_some(), is_past_the_last_event || generation.token_ids.len() == 2);
        assert_eq!(exchange.state() == State::Closed, !is_past_the_last_event);
        let later = put(&mut exchange, Input::Received(&bytes[end..]));
        assert!(later.iter().all(|event| *event == Event::Ended { reusable: true }), "the rest is read for reuse");
        assert_eq!(exchange.token_count(), generation.token_ids.len());
        assert!(exchange.take().token_ids.is_empty());
    }
}

#[test]
fn any_reply_will_do_where_no_stream_is_expected() {
    let expected = Expected::Body { max_bytes: 100 };
    let outcome = read([&chunked(b"[DONE]")[..]], Tail::Open, expected, false);
    assert_eq!(names(&outcome.events), ["head", "refused", "reusable"]);
    assert_eq!(outcome.body, b"[DONE]");
}

#[test]
fn a_reply_that_is_not_complete_is_a_failure_where_no_stream_is_expected() {
    let expected = Expected::Body { max_bytes: 100 };
    let outcome = read([&chunked(&[b'x'; 101])[..]], Tail::Open, expected, false);
    assert_eq!(names(&outcome.events), ["head", "failed", "ended"]);
    let half = &b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{}"[..];
    let outcome = read([half], Tail::Eof, expected, false);
    assert_eq!(names(&outcome.events), ["head", "failed", "ended"], "it looks like a whole reply");
    assert_eq!(outcome.body, b"{}");
}
