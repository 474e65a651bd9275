//! What one HTTP call produced: the result that `Parser::take` returns.

use crate::memory::grow;

/// Why the engine ended a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// `max_new_tokens` was reached.
    Length,
    /// The request was aborted.
    Abort,
}

impl FinishReason {
    /// The name in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// The stop token or stop string that ended a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matched {
    /// A token id.
    Token(i64),
    /// A stop string or its pattern.
    Text(String),
}

/// The ids of the experts that each token was routed to: `[rows, num_layers, top_k]` in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoutedExperts {
    /// SGLang's default type.
    Int32(Vec<i32>),
    /// Up to 256 experts.
    Uint8(Vec<u8>),
    /// Up to 65,536 experts.
    Uint16(Vec<u16>),
}

/// The candidates that sampling chose each token from: `ids[offsets[i]..offsets[i + 1]]` for token `i`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopP {
    /// The ids of all tokens, concatenated.
    pub ids: Vec<i32>,
    /// One more than tokens; starts at 0, ends at the number of ids.
    pub offsets: Vec<i32>,
}

impl TopP {
    /// The candidates of one token.
    pub(crate) fn of(&self, token: usize) -> &[i32] {
        let end = |index: usize| usize::try_from(self.offsets[index]).unwrap_or_default();
        &self.ids[end(token)..end(token + 1)]
    }
}

/// The weight version of the tokens `start..end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpan {
    /// The engine's label for its weights; None if it did not report one for these tokens.
    pub version: Option<String>,
    /// The first token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
}

/// What one HTTP call produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The sampled tokens, the stop token included.
    pub token_ids: Vec<i32>,
    /// One logprob for each token; None if logprobs were not requested.
    pub logprobs: Option<Vec<f64>>,
    /// The engine's text; None if it sent none.
    pub text: Option<String>,
    /// None if the stream ended before the terminal event.
    pub finish_reason: Option<FinishReason>,
    /// The stop token or stop string, if the engine reports it.
    pub matched: Option<Matched>,
    /// Routed experts, if the engine sent them. Their number is checked.
    pub routed_experts: Option<RoutedExperts>,
    /// The number of rows in `routed_experts`; None without [`Options::experts`](crate::Options::experts).
    pub expert_rows: Option<usize>,
    /// The number of rows in `routed_experts` that hold the engine's padding instead of experts.
    pub padded_rows: usize,
    /// The candidates of sampling, if the engine sent them for every token.
    pub top_p: Option<TopP>,
    /// The weight versions of the tokens, in order. They cover all tokens.
    pub version_spans: Vec<VersionSpan>,
    /// The prompt's tokens; None if the engine did not send them.
    pub prompt_token_ids: Option<Vec<i32>>,
    /// The number of prompt tokens that the engine reports, the latest value.
    pub prompt_tokens: Option<u64>,
    /// The number of prompt tokens read from the engine's prefix cache, the latest value.
    pub cached_tokens: Option<u64>,
    /// The number of logprobs that are the engine's substitute for minus infinity.
    pub clamped_logprobs: usize,
    /// The most new tokens that one event had.
    pub max_tokens_per_event: usize,
    /// Every other key with its latest value, both as JSON. If a key is in the list twice, the last one counts.
    pub meta: Vec<(String, String)>,
}

/// When the first tokens arrive, space is reserved for at most this many.
const FIRST_RESERVE: usize = 4096;

impl Generation {
    /// Make room for `more` tokens; for `expected` tokens in all when the first ones arrive. False: out of memory.
    pub(crate) fn reserve(&mut self, more: usize, expected: Option<usize>) -> bool {
        if let (Some(expected), true, 1..) = (expected, self.token_ids.is_empty(), more) {
            // If this fails, there may still be room for what is needed now.
            self.grow(expected.min(FIRST_RESERVE));
        }
        self.grow(more)
    }

    /// Make room for `more` tokens, or change nothing.
    ///
    /// This holds at most 12.75 bytes for each token, and realloc moves large blocks without a copy.
    fn grow(&mut self, more: usize) -> bool {
        grow(&mut self.token_ids, more) && self.logprobs.as_mut().is_none_or(|logprobs| grow(logprobs, more))
    }

    /// Record that the tokens from `start` on were produced by `version`.
    pub(crate) fn extend_version(&mut self, version: &str, start: usize) {
        let end = self.token_ids.len();
        if start == end {
            return;
        }
        match self.version_spans.last_mut() {
            Some(last) if last.end == start && last.version.as_deref() == Some(version) => last.end = end,
            _ => self.version_spans.push(VersionSpan { version: Some(version.to_owned()), start, end }),
        }
    }

    /// Add a span without a version for the tokens that no span covers.
    pub(crate) fn cover_versions(&mut self) {
        let count = self.token_ids.len();
        let mut covered = 0;
        let is_complete = self.version_spans.iter().all(|span| std::mem::replace(&mut covered, span.end) == span.start);
        if is_complete && covered == count {
            return;
        }
        covered = 0;
        for span in std::mem::take(&mut self.version_spans) {
            if covered < span.start {
                self.version_spans.push(VersionSpan { version: None, start: covered, end: span.start });
            }
            covered = span.end;
            self.version_spans.push(span);
        }
        if covered < count {
            self.version_spans.push(VersionSpan { version: None, start: covered, end: count });
        }
    }

    /// Bytes held by the buffers.
    pub(crate) fn held_bytes(&self) -> usize {
        let experts = match &self.routed_experts {
            None => 0,
            Some(RoutedExperts::Int32(ids)) => ids.capacity() * 4,
            Some(RoutedExperts::Uint8(ids)) => ids.capacity(),
            Some(RoutedExperts::Uint16(ids)) => ids.capacity() * 2,
        };
        let top_p = self.top_p.as_ref().map_or(0, |top_p| (top_p.ids.capacity() + top_p.offsets.capacity()) * 4);
        let logprobs = self.logprobs.as_ref().map_or(0, Vec::capacity) * size_of::<f64>();
        let ids = self.token_ids.capacity() + self.prompt_token_ids.as_ref().map_or(0, Vec::capacity);
        ids * size_of::<i32>() + logprobs + experts + top_p
    }

    /// Release unused capacity.
    pub(crate) fn shrink(&mut self) {
        self.token_ids.shrink_to_fit();
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.shrink_to_fit();
        }
        if let Some(top_p) = &mut self.top_p {
            top_p.ids.shrink_to_fit();
            top_p.offsets.shrink_to_fit();
        }
    }
}
