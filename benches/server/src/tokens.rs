//! The tokens that every stream carries, as the JSON that events hold of them.
//!
//! Token `i` is the same in each stream and each run: ids log-uniform up to 151,643 (Zipf's law), logprobs log-uniform
//! too (most tokens of a trained policy are nearly certain) and printed as a float32 widened to float64, as SGLang
//! does, three to four characters of text a token. `benches/streams.py` draws its tokens in the same way.

use std::io::Write;
use std::ops::Range;

/// Some of them need an escape in JSON; they are written as they stand inside a string.
const WORDS: [&str; 24] = [
    "Let",
    " us",
    " consider",
    " the",
    " remainder",
    " of",
    " the",
    " product",
    " modulo",
    " 7",
    ".",
    " It",
    " divides",
    " n",
    ",",
    "\\n\\n",
    "\\\\",
    "frac",
    "{",
    "}",
    " is",
    "\\\"",
    " k",
    " =",
];

/// One kind of element, all of them written one behind the other.
#[derive(Default)]
struct Column {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Column {
    fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.ends.push(self.bytes.len());
    }

    fn of(&self, range: &Range<usize>) -> &[u8] {
        let border = |index: usize| if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[border(range.start)..border(range.end)]
    }

    /// The elements of a JSON array; each was written with a comma behind it.
    fn list(&self, range: &Range<usize>) -> &[u8] {
        let elements = self.of(range);
        elements.strip_suffix(b",").unwrap_or(elements)
    }
}

/// The first tokens of the one endless response.
pub struct Tokens {
    random: Random,
    ids: Column,
    pairs: Column,
    texts: Column,
    entries: Column,
}

impl Tokens {
    /// None yet.
    pub fn new() -> Self {
        Self {
            random: Random(20),
            ids: Column::default(),
            pairs: Column::default(),
            texts: Column::default(),
            entries: Column::default(),
        }
    }

    /// Have at least this many.
    pub fn grow(&mut self, count: usize) {
        while self.ids.ends.len() < count {
            self.push();
        }
    }

    /// Elements of SGLang's `output_ids` and vLLM's `token_ids`.
    pub fn ids(&self, range: &Range<usize>) -> &[u8] {
        self.ids.list(range)
    }

    /// Elements of SGLang's `output_token_logprobs`.
    pub fn pairs(&self, range: &Range<usize>) -> &[u8] {
        self.pairs.list(range)
    }

    /// The inside of the JSON string of their text.
    pub fn text(&self, range: &Range<usize>) -> &[u8] {
        self.texts.of(range)
    }

    /// Elements of vLLM's `logprobs.content`.
    pub fn entries(&self, range: &Range<usize>) -> &[u8] {
        self.entries.list(range)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "both are within the vocabulary")]
    fn push(&mut self) {
        let id = self.random.between(10_f64.ln(), 151_643_f64.ln()).exp() as u32;
        let logprob = -f64::from(10_f64.powf(self.random.between(-6.0, 0.5)) as f32);
        let logprob = if logprob > -1e-5 { format!("{logprob:e}") } else { logprob.to_string() };
        let rank = 1 + self.random.next().trailing_zeros() / 2;
        let word = WORDS[self.random.next() as usize % WORDS.len()];
        self.ids.push(|out| write!(out, "{id},").expect("memory"));
        self.pairs.push(|out| write!(out, "[{logprob},{id},null],").expect("memory"));
        self.texts.push(|out| out.extend_from_slice(word.as_bytes()));
        let likely = format!(r#""token_id":{id},"logprob":{logprob},"rank":{rank}"#);
        self.entries.push(|out| write!(out, r#"{{{likely},"top_logprobs":[{{{likely}}}]}},"#).expect("memory"));
    }
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        let unit = f64::from(u32::try_from(self.next() >> 32).expect("32 bits")) / f64::from(u32::MAX);
        low + (high - low) * unit
    }
}
