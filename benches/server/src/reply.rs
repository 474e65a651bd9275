//! One response: the bytes of its events, chunked, as SGLang 0.5.23 and vLLM 0.32 write them.
//!
//! The keys, their order and their spelling are those of recorded streams. Nothing depends on the clock, so the same
//! request gets the same bytes.

use std::io::Write;
use std::ops::Range;

use crate::tokens::Tokens;

/// The start of every stream.
pub const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
    transfer-encoding: chunked\r\n\r\n";

/// Whose events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// `/generate`, each event with what is new.
    SglangIncremental,
    /// `/generate`, each event with the whole response.
    SglangCumulative,
    /// `/inference/v1/generate`.
    Vllm,
}

/// Why a response ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finish {
    Not,
    Length,
    Abort,
}

/// A response that is being sent.
pub struct Reply {
    pub engine: Engine,
    pub rid: String,
    pub prompt_tokens: usize,
    /// All tokens of the response.
    pub tokens: usize,
    pub per_event: usize,
    /// Tokens whose time has come.
    pub due: usize,
    /// Tokens that were sent.
    pub sent: usize,
    pub finished: bool,
}

impl Reply {
    /// Events of the whole response, those without tokens apart.
    pub fn events(&self) -> usize {
        self.tokens.div_ceil(self.per_event)
    }

    /// Write the next event that is due; false if there is none.
    pub fn write_next(&mut self, tokens: &Tokens, out: &mut Vec<u8>) -> bool {
        if self.finished || self.sent >= self.due {
            return false;
        }
        if self.sent == 0 {
            out.extend_from_slice(HEAD);
        }
        let end = self.due.min(self.sent + self.per_event);
        let finish = if end == self.tokens { Finish::Length } else { Finish::Not };
        self.write(end, finish, tokens, out);
        true
    }

    /// Write the terminal event of an abort.
    pub fn write_abort(&mut self, tokens: &Tokens, out: &mut Vec<u8>) {
        if self.sent == 0 {
            out.extend_from_slice(HEAD);
        }
        self.write(self.sent, Finish::Abort, tokens, out);
    }

    fn write(&mut self, end: usize, finish: Finish, tokens: &Tokens, out: &mut Vec<u8>) {
        let first = if self.engine == Engine::SglangCumulative { 0 } else { self.sent };
        match self.engine {
            Engine::Vllm => chunk(out, |out| self.vllm(&(first..end), finish, tokens, out)),
            _ => chunk(out, |out| self.sglang(&(first..end), finish, tokens, out)),
        }
        self.sent = end;
        if finish != Finish::Not {
            self.finished = true;
            if self.engine == Engine::Vllm {
                chunk(out, |out| self.vllm_usage(out));
            }
            chunk(out, |out| out.extend_from_slice(b"data: [DONE]\n\n"));
            out.extend_from_slice(b"0\r\n\r\n");
        }
    }

    fn sglang(&self, range: &Range<usize>, finish: Finish, tokens: &Tokens, out: &mut Vec<u8>) {
        let (rid, prompt, end) = (&self.rid, self.prompt_tokens, range.end);
        put(out, br#"data: {"text":""#);
        put(out, tokens.text(range));
        put(out, br#"","output_ids":["#);
        put(out, tokens.ids(range));
        format(out, format_args!(r#"],"meta_info":{{"id":"{rid}","finish_reason":"#));
        match finish {
            Finish::Not => put(out, b"null"),
            Finish::Length => format(out, format_args!(r#"{{"type":"length","length":{end}}}"#)),
            Finish::Abort => {
                put(out, br#"{"type":"abort","message":"Aborted","status_code":null,"err_type":null}"#);
            }
        }
        format(out, format_args!(r#","prompt_tokens":{prompt},"weight_version":"default","num_retractions":0,"#));
        put(out, br#""input_token_logprobs":[],"output_token_logprobs":["#);
        put(out, tokens.pairs(range));
        format(
            out,
            format_args!(r#"],"output_token_logprobs_length":{end},"reasoning_tokens":0,"completion_tokens":{end},"#),
        );
        put(out, br#""cached_tokens":0,"#);
        if finish != Finish::Not {
            format(out, format_args!(r#""weight_versions":[{{"version":"default","start":0,"end":{end}}}],"#));
        }
        put(out, br#""cached_tokens_details":null,"dp_rank":null"#);
        if self.sent == 0 {
            put(out, br#","response_sent_to_client_ts":1795951942.4590852"#);
        }
        if finish != Finish::Not {
            put(out, br#","e2e_latency":374.3338000001586"#);
        }
        put(out, b"}}\n\n");
    }

    fn vllm(&self, range: &Range<usize>, finish: Finish, tokens: &Tokens, out: &mut Vec<u8>) {
        let (rid, prompt, end) = (&self.rid, self.prompt_tokens, range.end);
        let total = prompt + end;
        format(out, format_args!(r#"data: {{"request_id":"generate-tokens-{rid}","usage":{{"#));
        format(out, format_args!(r#""prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{end},"#));
        put(out, br#""prompt_tokens_details":null,"completion_tokens_details":null},"output_mode":"tokens","#);
        put(out, br#""choices":[{"index":0,"finish_reason":"#);
        put(
            out,
            match finish {
                Finish::Not => b"null".as_slice(),
                Finish::Length => br#""length""#,
                Finish::Abort => br#""abort""#,
            },
        );
        put(out, br#","stop_reason":null,"token_ids":["#);
        put(out, tokens.ids(range));
        put(out, br#"],"routed_experts":null,"sampling_mask":null,"weight_versions":"#);
        if finish == Finish::Not {
            put(out, b"null");
        } else {
            format(out, format_args!(r#"[{{"version":"default","start":0,"end":{end}}}]"#));
        }
        put(out, br#","logprobs":{"content":["#);
        put(out, tokens.entries(range));
        put(out, b"]}}]}\n\n");
    }

    fn vllm_usage(&self, out: &mut Vec<u8>) {
        let (rid, prompt, end) = (&self.rid, self.prompt_tokens, self.sent);
        let total = prompt + end;
        format(out, format_args!(r#"data: {{"request_id":"generate-tokens-{rid}","usage":{{"#));
        format(out, format_args!(r#""prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{end},"#));
        put(out, br#""prompt_tokens_details":{"cached_tokens":0}},"output_mode":"tokens","choices":[]}"#);
        put(out, b"\n\n");
    }
}

/// Write one chunk of the chunked body.
fn chunk(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let mut event = Vec::with_capacity(1024);
    write(&mut event);
    format(out, format_args!("{:x}\r\n", event.len()));
    put(out, &event);
    put(out, b"\r\n");
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(bytes);
}

fn format(out: &mut Vec<u8>, arguments: std::fmt::Arguments<'_>) {
    out.write_fmt(arguments).expect("memory");
}
