//! Replies as servers write them, sound and broken.

use proptest::prelude::*;

use crate::streams::bodies;

/// How a body is delimited.
#[derive(Clone, Debug)]
enum Delimited {
    /// In chunks of these sizes, again and again, with an extension and trailers.
    Chunked(Vec<usize>, &'static str, &'static str),
    /// By its length, which is off by this many bytes.
    Sized(i64),
    UntilClose,
}

fn delimited() -> impl Strategy<Value = Delimited> {
    let extensions = prop::sample::select(vec!["", "", ";a=b", " ;a=\"b\"", "x", ";\n"]);
    let trailers = prop::sample::select(vec!["", "", "A: b\r\n", "A: b\r\nC:\r\n", "\n"]);
    prop_oneof![
        3 => (prop::collection::vec(1..400_usize, 1..4), extensions, trailers)
            .prop_map(|(sizes, extension, trailers)| Delimited::Chunked(sizes, extension, trailers)),
        2 => prop_oneof![4 => Just(0), 1 => -9..9_i64].prop_map(Delimited::Sized),
        1 => Just(Delimited::UntilClose),
    ]
}

impl Delimited {
    /// The fields that say so, and the body as it is on the wire.
    fn write(&self, body: &[u8]) -> (String, Vec<u8>) {
        match self {
            Self::UntilClose => (String::new(), body.to_vec()),
            Self::Sized(off) => {
                let length = i64::try_from(body.len()).expect("small") + off;
                (format!("Content-Length: {}\r\n", length.max(0)), body.to_vec())
            }
            Self::Chunked(sizes, extension, trailers) => {
                let (mut rest, mut wire) = (body, Vec::new());
                for size in sizes.iter().cycle() {
                    if rest.is_empty() {
                        break;
                    }
                    let (chunk, later) = rest.split_at((*size).min(rest.len()));
                    wire.extend_from_slice(format!("{:X}{extension}\r\n", chunk.len()).as_bytes());
                    wire.extend_from_slice(chunk);
                    wire.extend_from_slice(b"\r\n");
                    rest = later;
                }
                wire.extend_from_slice(format!("0{extension}\r\n{trailers}\r\n").as_bytes());
                ("Transfer-Encoding: chunked\r\n".to_owned(), wire)
            }
        }
    }
}

fn statuses() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        12 => Just("1.1 200 OK"),
        2 => Just("1.0 200 OK"),
        2 => prop::sample::select(vec!["1.1 503 ", "1.1 400", "1.0 307 Moved", "1.1 204 No Content", "1.1 099 No", "2 200"]),
    ]
}

fn fields() -> impl Strategy<Value = Option<&'static str>> {
    let others = vec![
        "Connection: close\r\n",
        "connection: Keep-Alive, x\r\n",
        "Content-Encoding: gzip\r\n",
        "Content-Length: 12\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Server: caf\u{e9}\r\n",
        "A: b\r\n c\r\n",
        "A: b\0\r\n",
    ];
    prop::option::weighted(0.25, prop::sample::select(others))
}

prop_compose! {
    /// A reply with all that may stand before and behind it.
    pub fn replies()(
        interim in prop_oneof![8 => 0..3_usize, 1 => 16..18_usize],
        (status, others, kind) in (statuses(), fields(), prop::sample::select(vec![
            "text/event-stream", "text/event-stream", "Text/Event-Stream; charset=utf-8", "application/json",
        ])),
        (body, delimited) in (bodies(), delimited()),
        behind in prop::sample::select(vec!["", "", "", "\r\n", "HTTP/1.1 200 OK\r\n\r\n"]),
        end in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) -> Vec<u8> {
        let (delimiting, wire) = delimited.write(&body);
        let interim = "HTTP/1.1 100 Continue\r\nA: b\r\n\r\n".repeat(interim);
        let head = format!("{interim}HTTP/{status}\r\nContent-Type: {kind}\r\n{delimiting}{}\r\n", others.unwrap_or_default());
        let mut bytes = [head.as_bytes(), &wire, behind.as_bytes()].concat();
        if let Some(end) = end {
            bytes.truncate(end.index(bytes.len()));
        }
        bytes
    }
}

prop_compose! {
    /// A reply with a few bytes changed, doubled or left out.
    pub fn damaged_replies()(
        mut bytes in replies(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..4),
    ) -> Vec<u8> {
        for (place, byte, how) in damage {
            if bytes.is_empty() {
                break;
            }
            let place = place.index(bytes.len());
            match how {
                0 => bytes[place] = byte,
                1 => drop(bytes.remove(place)),
                _ => bytes.insert(place, byte),
            }
        }
        bytes
    }
}

/// Split `bytes` at each of `places`, taken modulo its length.
pub fn split<'a>(bytes: &'a [u8], places: &[usize]) -> Vec<&'a [u8]> {
    let mut places: Vec<_> = places.iter().map(|place| place % (bytes.len() + 1)).collect();
    places.sort_unstable();
    let mut parts = Vec::new();
    let mut start = 0;
    for place in places {
        parts.push(&bytes[start..place]);
        start = place;
    }
    parts.push(&bytes[start..]);
    parts
}
