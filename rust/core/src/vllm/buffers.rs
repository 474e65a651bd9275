//! Buffers for the elements of an event's lists until the event is checked.

use crate::arrays::NO_TOKEN;
use crate::key_cache::KeyCache;
use crate::meta::Members;
use crate::prompt_ids::PromptIds;
use crate::vllm::keys::Key;

/// Marks an entry without a token id.
pub(super) const NO_ID: i32 = -2;

/// The objects of an event whose keys go to `Generation.meta`.
#[derive(Clone, Copy)]
pub(super) enum Level {
    Event,
    Choice,
    Usage,
}

/// The elements of an event's lists. The memory is reused for the next event.
pub(super) struct EventBuffers {
    /// Whether logprobs were requested.
    pub has_logprobs: bool,
    pub ids: Vec<i32>,
    /// Not finite where the element is not a number in the range of a double.
    pub logprobs: Vec<f64>,
    /// The ids beside the logprobs.
    pub named_ids: Vec<i32>,
    pub prompt_ids: PromptIds,
    /// For each [`Level`], what goes to `Generation.meta`.
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

    /// Start an event.
    pub(super) fn clear(&mut self) {
        self.members.iter_mut().for_each(Members::clear);
        self.key_cache.start_event();
        self.clear_choice();
    }

    /// Start a choice: an earlier one in the same event does not count.
    pub(super) fn clear_choice(&mut self) {
        self.ids.clear();
        self.members[Level::Choice as usize].clear();
        self.clear_logprobs();
    }

    pub(super) fn clear_logprobs(&mut self) {
        self.logprobs.clear();
        self.named_ids.clear();
    }

    /// The first token whose id differs from the id beside its logprob. Elements that are not token ids are left to the
    /// check of ids.
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
