//! Builds a `Generation` from events: the arrays so far, the text, and the keys for `meta`.

use crate::generation::Generation;
use crate::memory::grow;
use crate::meta::Meta;
use crate::text::{string, unescape};

/// The text so far.
///
/// In a cumulative stream each event replaces the whole text. It is kept as JSON and decoded only when it is needed.
#[derive(Clone, Default)]
pub(crate) struct TextBuilder {
    /// UTF-8: it is checked once, at the end, and not at each event.
    plain: Vec<u8>,
    /// The offset in `plain` where the text of the last event with a text begins.
    last: usize,
    /// The text as a JSON string. If `is_raw`, it replaces `plain`.
    raw: Vec<u8>,
    is_raw: bool,
    is_present: bool,
    is_missing: bool,
}

impl TextBuilder {
    /// Reserve space to append, or to replace the text by, a JSON string of `length` bytes. False: out of memory.
    pub(crate) fn reserve(&mut self, length: usize, replaces: bool) -> bool {
        if replaces {
            return self.raw.capacity() >= length || grow(&mut self.raw, length);
        }
        grow(&mut self.plain, length)
    }

    pub(crate) fn append(&mut self, raw: &[u8], has_escapes: bool) {
        self.decode_raw();
        self.is_present = true;
        self.last = self.plain.len();
        if has_escapes {
            unescape(raw, &mut self.plain);
        } else {
            self.plain.extend_from_slice(raw);
        }
    }

    pub(crate) fn replace(&mut self, raw: &[u8]) {
        self.is_present = true;
        self.is_raw = true;
        self.raw.clear();
        self.raw.extend_from_slice(raw);
    }

    pub(crate) fn set(&mut self, text: String) {
        self.is_present = true;
        self.is_raw = false;
        self.last = 0;
        self.plain = text.into_bytes();
    }

    /// The stream was detected to be cumulative: only the last text counts.
    pub(crate) fn keep_last(&mut self) {
        self.decode_raw();
        self.plain.drain(..self.last);
        self.last = 0;
    }

    /// An event had tokens and no text, so the text is incomplete.
    pub(crate) fn mark_missing(&mut self) {
        self.is_missing = true;
    }

    pub(crate) fn plain(&mut self) -> &str {
        self.decode_raw();
        std::str::from_utf8(&self.plain).unwrap_or_default()
    }

    pub(crate) fn take(&mut self) -> Option<String> {
        self.decode_raw();
        let text = string(std::mem::take(&mut self.plain));
        (self.is_present && !self.is_missing).then_some(text)
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.plain.capacity() + self.raw.capacity()
    }

    fn decode_raw(&mut self) {
        if self.is_raw {
            self.is_raw = false;
            self.last = 0;
            self.plain.clear();
            unescape(&self.raw, &mut self.plain);
        }
    }
}

/// A generation under construction.
#[derive(Clone, Default)]
pub(crate) struct GenerationBuilder {
    pub generation: Generation,
    pub text: TextBuilder,
    /// The keys for `Generation.meta` by level. If two levels have the same key, the innermost counts.
    pub meta: [Meta; 3],
    /// Whether every token so far has its sampling mask.
    pub covers_top_p: bool,
}

impl GenerationBuilder {
    pub(crate) fn new(logprobs: bool) -> Self {
        let generation = Generation { logprobs: logprobs.then(Vec::new), ..Generation::default() };
        Self { generation, covers_top_p: true, ..Self::default() }
    }

    pub(crate) fn take(&mut self) -> Generation {
        let mut generation = std::mem::take(&mut self.generation);
        generation.cover_versions();
        generation.text = self.text.take();
        // A key of several levels is in the list several times, and the last one counts.
        generation.meta = self.meta.iter_mut().flat_map(Meta::take).collect();
        generation.shrink();
        generation
    }

    /// What [`GenerationBuilder::take`] would return. Nothing is changed.
    pub(crate) fn snapshot(&self) -> Generation {
        self.clone().take()
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.generation.held_bytes() + self.text.held_bytes() + self.meta.iter().map(Meta::held_bytes).sum::<usize>()
    }
}
