//! Bodies of streams, as SGLang writes them with `--incremental-streaming-output`, and vLLM.

use proptest::prelude::*;

/// An event with `new` more tokens behind `before` earlier ones.
pub fn event(before: usize, new: usize, finish: Option<&str>) -> String {
    let pairs: Vec<_> = (before..before + new).map(|index| format!("[-0.5,{},null]", index % 7)).collect();
    let finish = finish.map_or("null".to_owned(), |finish| format!("{{\"type\":\"{finish}\"}}"));
    format!(
        "data: {{\"text\":\"é\",\"meta_info\":{{\"id\":\"r\",\"completion_tokens\":{},\"output_token_logprobs\":[{}],\
         \"finish_reason\":{finish}}}}}",
        before + new,
        pairs.join(",")
    )
}

/// Two events with a token each, the second one the terminal event, and `[DONE]`.
pub fn short() -> String {
    format!("{}\n\n{}\n\ndata: [DONE]\n\n", event(0, 1, None), event(1, 1, Some("stop")))
}

/// What ends a body.
fn ends() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("data: [DONE]\n\n".to_owned()),
        1 => Just(String::new()),
        1 => Just("data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\ndata: [DONE]\n\n".to_owned()),
        1 => Just("data: {\"text\":\n\n".to_owned()),
        1 => (1..5_usize).prop_map(|count| ": ping\n\n".repeat(count)),
        1 => (65_500..65_600_usize).prop_map(|count| format!(": {}\n\n", "x".repeat(count))),
        1 => Just(format!("{}\n\n", event(0, 1, None))),
    ]
}

prop_compose! {
    /// Bodies: events, mostly finished, with any line ends.
    pub fn bodies()(
        news in prop::collection::vec(prop::sample::select(vec![0, 1, 1, 3, 120]), 0..6),
        finish in prop::option::weighted(0.7, prop::sample::select(vec!["stop", "length", "abort"])),
        pings in any::<bool>(),
        line_end in prop::sample::select(vec!["\n", "\n", "\r\n", "\r"]),
        end in ends(),
        is_blank_line_missing in prop::bool::weighted(0.1),
    ) -> Vec<u8> {
        let (mut body, mut before) = (String::new(), 0);
        for (index, &new) in news.iter().enumerate() {
            let is_last = index + 1 == news.len();
            body += &event(before, new, finish.filter(|_| is_last));
            body += if is_last && is_blank_line_missing { "\n" } else { "\n\n" };
            before += new;
            if pings && !is_last {
                body += ": ping\n\n";
            }
        }
        (body + &end).replace('\n', line_end).into_bytes()
    }
}
