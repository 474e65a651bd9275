//! A generation while its events are read: the arrays so far, the text, and everything for `meta`.

use crate::generation::Generation;
use crate::memory::grow;
use crate::meta::Meta;
use crate::text::unescape;

/// The text so far.
///
/// A whole text that replaces the last one is kept as it came and decoded when somebody wants it: a cumulative
/// stream repeats it in each event.
#[derive(Default)]
pub(crate) struct TextBuilder {
    plain: String,
    /// Where the text of the last event that held one begins in `plain`.
    last: usize,
    /// A string of JSON that stands for the text instead of `plain`.
    raw: Vec<u8>,
    is_raw: bool,
    is_present: bool,
    is_missing: bool,
}

impl TextBuilder {
    /// Make room for a string of JSON of `length` bytes, to be appended or to replace, or change nothing.
    pub(crate) fn reserve(&mut self, length: usize, replaces: bool) -> bool {
        if replaces {
            return self.raw.capacity() >= length || grow(&mut self.raw, length);
        }
        let (room, least) = (self.plain.capacity() - self.plain.len(), length.max(self.plain.len() / 16));
        room >= length || self.plain.try_reserve_exact(least).is_ok()
    }

    pub(crate) fn append(&mut self, raw: &[u8], has_escapes: bool) {
        self.decode_raw();
        self.is_present = true;
        self.last = self.plain.len();
        if has_escapes {
            unescape(raw, &mut self.plain);
        } else {
            self.plain.push_str(std::str::from_utf8(raw).unwrap_or_default());
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
        self.plain = text;
    }

    /// The events have turned out to be cumulative: only the last text counts.
    pub(crate) fn keep_last(&mut self) {
        self.decode_raw();
        self.plain.drain(..self.last);
        self.last = 0;
    }

    /// An event brought tokens and no text.
    pub(crate) fn mark_missing(&mut self) {
        self.is_missing = true;
    }

    pub(crate) fn plain(&mut self) -> &str {
        self.decode_raw();
        &self.plain
    }

    pub(crate) fn take(&mut self) -> Option<String> {
        self.decode_raw();
        let text = std::mem::take(&mut self.plain);
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

/// A generation while it grows.
#[derive(Default)]
pub(crate) struct GenerationBuilder {
    pub generation: Generation,
    pub text: TextBuilder,
    /// What each level of the events told beside all that; of one key the innermost level counts.
    pub meta: [Meta; 3],
    /// Whether sampling masks have come for every token so far.
    pub covers_top_p: bool,
}

impl GenerationBuilder {
    pub(crate) fn new(logprobs: bool) -> Self {
        let generation = Generation { logprobs: logprobs.then(Vec::new), ..Generation::default() };
        Self { generation, covers_top_p: true, ..Self::default() }
    }

    pub(crate) fn take(&mut self) -> Generation {
        let mut generation = std::mem::take(&mut self.generation);
        generation.text = self.text.take();
        // A key that stands in several places comes as often, and the last one counts.
        generation.meta = self.meta.iter_mut().flat_map(Meta::take).collect();
        generation.shrink();
        generation
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.generation.held_bytes() + self.text.held_bytes() + self.meta.iter().map(Meta::held_bytes).sum::<usize>()
    }
}
