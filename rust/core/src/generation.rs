//! What one HTTP call produced: the result that `Parser::take` returns.

use crate::memory::grow;

/// Why the engine ended a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// The budget is used up.
    Length,
    /// Somebody aborted it.
    Abort,
}

impl FinishReason {
    /// The word on the wire, and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// What a generation stopped at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matched {
    /// A token id.
    Token(i64),
    /// A stop string, or the pattern of one.
    Text(String),
}

/// The ids of the experts that each token was routed to, in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoutedExperts {
    /// SGLang's own type.
    Int32(Vec<i32>),
    /// Up to 256 experts.
    Uint8(Vec<u8>),
    /// Up to 65,536 experts.
    Uint16(Vec<u16>),
}

/// The ids that sampling could choose, per token: `ids[offsets[i]..offsets[i + 1]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopP {
    /// All ids, one token after the other.
    pub ids: Vec<i32>,
    /// Tokens + 1 of them.
    pub offsets: Vec<i32>,
}

impl TopP {
    /// The ids of one token.
    pub(crate) fn of(&self, token: usize) -> &[i32] {
        let end = |index: usize| usize::try_from(self.offsets[index]).unwrap_or_default();
        &self.ids[end(token)..end(token + 1)]
    }
}

/// Which weights produced the tokens `start..end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpan {
    /// The engine's label for its weights.
    pub version: String,
    /// The first token.
    pub start: usize,
    /// Behind the last token.
    pub end: usize,
}

/// What one HTTP call produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The sampled tokens.
    pub token_ids: Vec<i32>,
    /// One for each token; None if they were not asked for.
    pub logprobs: Option<Vec<f64>>,
    /// The engine's text; None if it sent none.
    pub text: Option<String>,
    /// None if the stream was cut.
    pub finish_reason: Option<FinishReason>,
    /// What it stopped at, if told.
    pub matched: Option<Matched>,
    /// Routed experts, if sent; the parser has checked their number.
    pub routed_experts: Option<RoutedExperts>,
    /// The rows of `routed_experts`; None if the parser was not told their shape.
    pub expert_rows: Option<usize>,
    /// Sampling masks, if sent for every token.
    pub top_p: Option<TopP>,
    /// Weight versions over the tokens, in order.
    pub version_spans: Vec<VersionSpan>,
    /// The prompt's tokens; None if the engine did not send them.
    pub prompt_token_ids: Option<Vec<i32>>,
    /// The length of the prompt, as last told.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the prompt that came from the cache, as last told.
    pub cached_tokens: Option<u64>,
    /// Logprobs kept although they are a stand-in for minus infinity.
    pub clamped_logprobs: usize,
    /// Every other key with its latest value, both as JSON. Of a key that comes twice the last value counts.
    pub meta: Vec<(String, String)>,
}

impl Generation {
    /// Make room for `more` tokens, or change nothing.
    ///
    /// At most 12.75 bytes are held per token, and realloc moves large blocks without a copy.
    pub(crate) fn reserve(&mut self, more: usize) -> bool {
        grow(&mut self.token_ids, more) && self.logprobs.as_mut().is_none_or(|logprobs| grow(logprobs, more))
    }

    /// Note that the tokens from `start` on came from `version`.
    pub(crate) fn extend_version(&mut self, version: &str, start: usize) {
        let end = self.token_ids.len();
        if start == end {
            return;
        }
        match self.version_spans.last_mut() {
            Some(last) if last.end == start && last.version == version => last.end = end,
            _ => self.version_spans.push(VersionSpan { version: version.to_owned(), start, end }),
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

    /// Give back what the buffers reserved for more.
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
