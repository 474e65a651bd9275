//! The JSON parser agrees with `serde_json`: it accepts and rejects the same bytes and reads the same values.

mod common;

use common::read;
use proptest::prelude::*;
use serde_json::Value;
use streamfold_core::{Dialect, Error, ErrorKind, Options};

/// An event that holds `value` under an unknown key.
fn event_with(dialect: Dialect, value: &[u8]) -> Vec<u8> {
    let (before, after) = match dialect {
        Dialect::Vllm => (&br#"{"choices":[{"token_ids":[],"other":"#[..], &b"}]}"[..]),
        Dialect::VllmCompletions => (&br#"{"choices":[],"usage":{"other":"#[..], &b"}}"[..]),
        _ => (&br#"{"meta_info":{"completion_tokens":0,"output_token_logprobs":[],"other":"#[..], &b"}}"[..]),
    };
    [b"data: ", before, value, after, b"\n\n"].concat()
}

/// An event that holds one token, written as the engine would.
fn event_with_token(dialect: Dialect, logprob: &str, id: &str) -> Vec<u8> {
    let event = match dialect {
        Dialect::Vllm => {
            let likely = format!("\"token_id\":{id},\"logprob\":{logprob},\"rank\":1");
            let entry = format!("{{{likely},\"top_logprobs\":[{{{likely}}}]}}");
            format!("{{\"choices\":[{{\"token_ids\":[{id}],\"logprobs\":{{\"content\":[{entry}]}}}}]}}")
        }
        Dialect::VllmCompletions => {
            format!("{{\"choices\":[{{\"token_ids\":[{id}],\"logprobs\":{{\"token_logprobs\":[{logprob}]}}}}]}}")
        }
        _ => format!("{{\"meta_info\":{{\"completion_tokens\":1,\"output_token_logprobs\":[[{logprob},{id},null]]}}}}"),
    };
    format!("data: {event}\n\n").into_bytes()
}

/// One dialect for each endpoint.
fn dialects() -> impl Strategy<Value = Dialect> {
    prop::sample::select(vec![Dialect::Sglang, Dialect::Vllm, Dialect::VllmCompletions])
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map("[^\\\\]{0,6}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn the_value_of_an_unknown_key_is_kept_in_meta(value in values(), dialect in dialects()) {
        let body = event_with(dialect, value.to_string().as_bytes());
        let (generation, error, ..) = read([&body[..]], dialect, Options::default());
        prop_assert!(matches!(error, Some(Error::Truncated { .. })), "{error:?}");
        let other = generation.meta.iter().find(|(key, _)| key == "other");
        if value.is_array() {
            prop_assert!(other.is_none());
        } else {
            let found: Value = serde_json::from_str(&other.expect("a scalar or an object").1).expect("JSON");
            prop_assert_eq!(found, value);
        }
    }

    #[test]
    fn bytes_are_json_here_exactly_where_they_are_for_serde(
        value in values(), dialect in dialects(), place in any::<prop::sample::Index>(), byte in prop::sample::select(b"\"\\{}[],:0123456789eE+-.tfnu \n\x01\x7f\xff\xc3".to_vec()),
    ) {
        let mut bytes = value.to_string().into_bytes();
        let place = place.index(bytes.len());
        bytes[place] = byte;
        // A line feed ends the line, and so the data.
        prop_assume!(!bytes.contains(&b'\n'));
        let body = event_with(dialect, &bytes);
        let data = &body[6..body.len() - 2];
        let (_, error, ..) = read([&body[..]], dialect, Options::default());
        let refused = matches!(&error, Some(Error::Parse(error)) if matches!(error.kind, ErrorKind::Json | ErrorKind::Utf8));
        prop_assert_eq!(refused, serde_json::from_slice::<Value>(data).is_err(), "{:?} {:?}", String::from_utf8_lossy(data), error);
    }

    #[test]
    fn a_logprob_is_the_nearest_double_however_it_is_spelled(
        bits in any::<u64>(), single in any::<f32>(), extra in 0..25_usize, how in 0..5, dialect in dialects(),
    ) {
        let number = f64::from_bits(bits);
        prop_assume!(number.is_finite() && single.is_finite());
        let text = match how {
            0 => format!("{number:?}"),
            1 => format!("{number:.extra$}"),
            2 => format!("{number:e}"),
            3 => format!("{number:.extra$e}"),
            _ => format!("{:?}", f64::from(single)),
        };
        let expected: f64 = text.parse().expect("a number");
        prop_assume!(expected.is_finite() && expected != -3.402_823_466_385_288_6e38 && expected != -9999.0);
        let (generation, ..) = read([&event_with_token(dialect, &text, "7")[..]], dialect, Options::default());
        // An integer literal has no negative zero.
        let expected = if expected == 0.0 && text.bytes().all(|byte| byte == b'-' || byte == b'0') { 0.0 } else { expected };
        prop_assert_eq!(generation.logprobs.expect("requested")[0].to_bits(), expected.to_bits(), "{}", text);
    }

    #[test]
    fn digits_of_any_number_are_read_as_std_reads_them(
        digits in "[1-9][0-9]{0,30}", places in 0..40_usize, zeros in "0{0,6}", is_negative in any::<bool>(),
        dialect in dialects(),
    ) {
        let sign = if is_negative { "-" } else { "" };
        let text = format!("{sign}0.{zeros}{}{digits}", "0".repeat(places % 9));
        let expected: f64 = text.parse().expect("a number");
        let (generation, ..) = read([&event_with_token(dialect, &text, "7")[..]], dialect, Options::default());
        prop_assert_eq!(generation.logprobs.expect("requested")[0].to_bits(), expected.to_bits(), "{}", text);
    }

    #[test]
    fn a_token_is_an_integer_of_31_bits_or_an_error(
        id in any::<i64>(), suffix in prop::sample::select(vec!["", "", ".0", "e1"]), dialect in dialects(),
    ) {
        let text = format!("{id}{suffix}");
        let (generation, error, ..) = read([&event_with_token(dialect, "-0.5", &text)[..]], dialect, Options::default());
        match i32::try_from(id).ok().filter(|&id| id >= 0 && suffix.is_empty()) {
            Some(id) => prop_assert_eq!(generation.token_ids, [id]),
            None => prop_assert!(matches!(error, Some(Error::Parse(error)) if error.kind == ErrorKind::Token)),
        }
    }
}
