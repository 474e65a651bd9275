//! Buffers for the elements of an event's lists until the event is checked.

use crate::arrays::{NO_TOKEN, element_at};
use crate::field::List;
use crate::generation::Generation;
use crate::json::Cursor;
use crate::key_cache::KeyCache;
use crate::meta::Members;
use crate::prefix::Prefix;
use crate::prompt_ids::PromptIds;
use crate::sglang::keys::Key;

/// The objects of an event whose keys go to `Generation.meta`.
#[derive(Clone, Copy)]
pub(super) enum Level {
    Event,
    Meta,
}

/// The elements of an event's lists, and fingerprints of earlier lists. The memory is reused for the next event.
pub(super) struct EventBuffers {
    /// Whether logprobs were requested. Then the pairs are the source of the tokens, else `output_ids` are.
    pub has_pairs: bool,
    /// The token ids of the source list.
    pub ids: Vec<i32>,
    /// Not finite where the element is not a number in the range of a double.
    pub logprobs: Vec<f64>,
    /// The ids in `output_ids`, if the pairs are the source.
    pub output_ids: Vec<i32>,
    pub pairs_prefix: Prefix,
    pub ids_prefix: Prefix,
    pub prompt_ids: PromptIds,
    /// For each [`Level`], what goes to `Generation.meta`.
    pub members: [Members; 2],
    pub key_cache: KeyCache<Key>,
}

impl EventBuffers {
    pub(super) fn new(has_pairs: bool) -> Self {
        Self {
            has_pairs,
            ids: Vec::new(),
            logprobs: Vec::new(),
            output_ids: Vec::new(),
            pairs_prefix: Prefix::new(),
            ids_prefix: Prefix::new(),
            prompt_ids: PromptIds::new(),
            members: Default::default(),
            key_cache: KeyCache::default(),
        }
    }

    pub(super) fn held_bytes(&self) -> usize {
        (self.ids.capacity() + self.output_ids.capacity()) * 4
            + self.logprobs.capacity() * 8
            + self.members.iter().map(Members::held_bytes).sum::<usize>()
            + self.prompt_ids.held_bytes()
            + self.key_cache.held_bytes()
            + self.pairs_prefix.held_bytes()
            + self.ids_prefix.held_bytes()
    }
}

/// The elements of the source list. Those recognized by their fingerprint are the tokens kept.
#[derive(Clone, Copy)]
pub(super) struct Elements<'a> {
    list: Option<&'a List>,
    buffers: &'a EventBuffers,
    kept: &'a Generation,
}

impl<'a> Elements<'a> {
    pub(super) fn new(list: Option<&'a List>, buffers: &'a EventBuffers, kept: &'a Generation) -> Self {
        Self { list, buffers, kept }
    }

    fn len(self) -> usize {
        self.list.map_or(0, List::len)
    }

    fn id(self, index: usize) -> Option<i32> {
        let known = self.list?.known();
        if index < known { self.kept.token_ids.get(index) } else { self.buffers.ids.get(index - known) }.copied()
    }

    fn logprob(self, index: usize) -> Option<f64> {
        let known = self.list?.known();
        let kept = self.kept.logprobs.as_ref()?;
        if index < known { kept.get(index) } else { self.buffers.logprobs.get(index - known) }.copied()
    }

    /// The first kept token that differs from its element, where elements from `start` on repeat the kept tokens.
    pub(super) fn first_change(self, start: usize) -> Option<usize> {
        let kept = self.kept;
        if start == 0 && self.list.is_some_and(|list| list.known() == kept.token_ids.len()) {
            return None;
        }
        (0..kept.token_ids.len()).find(|&index| {
            let logprob = kept.logprobs.as_ref().map(|logprobs| logprobs[index]);
            self.id(start + index) != Some(kept.token_ids[index]) || self.logprob(start + index) != logprob
        })
    }

    pub(super) fn begin_with_kept(self) -> bool {
        self.len() >= self.kept.token_ids.len() && self.first_change(0).is_none()
    }

    /// Whether the first `count` elements equal the last `count` elements.
    pub(super) fn begin_with_last(self, count: usize) -> bool {
        let last = self.len() - count;
        let is_same = |left: Option<f64>, right: Option<f64>| left == right || (is_none(left) && is_none(right));
        (0..count).all(|index| {
            self.id(index) == self.id(last + index) && is_same(self.logprob(index), self.logprob(last + index))
        })
    }
}

/// Whether there is no number: NaN marks a logprob that is not one, and it does not equal itself.
fn is_none(logprob: Option<f64>) -> bool {
    logprob.is_none_or(f64::is_nan)
}

impl EventBuffers {
    /// Make sure that the elements from `first` on are in the buffers. Returns the index of `first` there.
    pub(super) fn buffer_from(&mut self, list: Option<&List>, first: usize, kept: &Generation) -> usize {
        let known = list.map_or(0, List::known);
        if first >= known {
            return first - known;
        }
        // A delta that happens to begin with the elements of the last list.
        self.ids.splice(0..0, kept.token_ids[..known].iter().copied());
        if let Some(logprobs) = &kept.logprobs {
            self.logprobs.splice(0..0, logprobs[..known].iter().copied());
        }
        first
    }

    /// The first index at which the ids of the pairs differ from `output_ids`.
    pub(super) fn first_mismatch(&self, data: &[u8], pairs: &List, ids: &List, kept: &Generation) -> Option<usize> {
        if pairs.known() == ids.known() && self.ids == self.output_ids && !self.ids.contains(&NO_TOKEN) {
            return None;
        }
        let from = |known: usize, new: &'_ [i32], index: usize| {
            if index < known { kept.token_ids.get(index) } else { new.get(index - known) }.copied()
        };
        (0..pairs.len().min(ids.len())).find(|&index| {
            let pair = from(pairs.known(), &self.ids, index);
            // Elements that are not token ids are all NO_TOKEN here, so their bytes are compared.
            pair != from(ids.known(), &self.output_ids, index)
                || (pair == Some(NO_TOKEN) && !is_same_number(data, pairs, ids, index))
        })
    }
}

/// Whether two elements that are not token ids have the same bytes or are equal numbers.
fn is_same_number(data: &[u8], pairs: &List, ids: &List, index: usize) -> bool {
    let literal = |at: usize| {
        let mut cursor = Cursor::new(data);
        cursor.at = at;
        cursor.skip_value(4).map_or(&[][..], |span| span.of(data))
    };
    let (pair, id) = (literal(pair_at(data, pairs, index, 1)), literal(element_at(data, ids.start(), index)));
    let value = |bytes: &[u8]| std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<f64>().ok());
    pair == id || value(pair).is_some_and(|pair| value(id).is_some_and(|id| pair.total_cmp(&id).is_eq()))
}

/// The offset of a member of a pair.
pub(super) fn pair_at(data: &[u8], list: &List, index: usize, member: usize) -> usize {
    let mut cursor = Cursor::new(data);
    cursor.at = element_at(data, list.start(), index);
    let pair = cursor.at;
    if !cursor.next_array() {
        return pair;
    }
    for _ in 0..member {
        if cursor.skip_value(4).is_err() || !cursor.next_element().unwrap_or(false) {
            return pair;
        }
    }
    cursor.peek().map_or(pair, |_| cursor.at)
}
