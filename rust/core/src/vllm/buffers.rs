//! The elements of an event's lists, on their way to the generation.

use crate::arrays::NO_TOKEN;
use crate::key_cache::KeyCache;
use crate::meta::Members;
use crate::prompt_ids::PromptIds;
use crate::vllm::keys::Key;

/// Stands for the id of an entry that tells none.
pub(super) const NO_ID: i32 = -2;

/// The objects of an event whose keys go to `Generation.meta`.
#[derive(Clone, Copy)]
pub(super) enum Level {
    Event,
    Choice,
    Usage,
}

/// Kept from event to event for its memory.
pub(super) struct EventBuffers {
    /// Whether logprobs were asked for.
    pub has_logprobs: bool,
    pub ids: Vec<i32>,
    /// Not finite where the wire holds no number that a double can.
    pub logprobs: Vec<f64>,
    /// The ids that stand beside the logprobs.
    pub named_ids: Vec<i32>,
    pub prompt_ids: PromptIds,
    /// Of the event, its choice, and its usage.
    pub members: [Members; 3],
    pub key_cache: KeyCache<Key>,
}

impl EventBuffers {
    pub(super) fn new(has_logprobs: bool) -> Self {
        Self {
            has_logprobs,
            ids: Vec::new(),
            logprobs: Vec::new(),
            named_ids: Vec::new(),
            prompt_ids: PromptIds::new(),
            members: Default::default(),
            key_cache: KeyCache::default(),
        }
    }

    /// An event begins.
    pub(super) fn clear(&mut self) {
        self.members.iter_mut().for_each(Members::clear);
        self.key_cache.start_event();
        self.clear_choice();
    }

    /// A choice begins; what one under the same key held does not count.
    pub(super) fn clear_choice(&mut self) {
        self.ids.clear();
        self.members[Level::Choice as usize].clear();
        self.clear_logprobs();
    }

    pub(super) fn clear_logprobs(&mut self) {
        self.logprobs.clear();
        self.named_ids.clear();
    }

    /// The first token beside which another id is named. An id that is no token at all is reported as such.
    pub(super) fn first_mismatch(&self) -> Option<usize> {
        if self.ids == self.named_ids {
            return None;
        }
        let is_other = |(&id, &named): (&i32, &i32)| id != named && id != NO_TOKEN && named != NO_ID;
        self.ids.iter().zip(&self.named_ids).position(is_other)
    }

    pub(super) fn held_bytes(&self) -> usize {
        (self.ids.capacity() + self.named_ids.capacity()) * 4
            + self.logprobs.capacity() * 8
            + self.members.iter().map(Members::held_bytes).sum::<usize>()
            + self.prompt_ids.held_bytes()
            + self.key_cache.held_bytes()
    }
}
