//! `prompt_token_ids`: the prompt's token ids, parsed and checked once. SGLang repeats the list in every event.

use crate::arrays::{element_at, next_tokens};
use crate::checks;
use crate::error::{ErrorKind, EventError};
use crate::field::{Field, List};
use crate::generation::Generation;
use crate::json::{Cursor, Result as JsonResult};
use crate::options::Options;
use crate::prefix::Prefix;

/// The list of the current event, and the fingerprint of the last one that was applied.
pub(crate) struct PromptIds {
    ids: Vec<i32>,
    last: Prefix,
}

impl PromptIds {
    pub(crate) fn new() -> Self {
        Self { ids: Vec::new(), last: Prefix::new() }
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.ids.capacity() * size_of::<i32>() + self.last.held_bytes()
    }

    /// Take the list, inside `depth` containers, into `field`. If its bytes are those of the last list, it is not parsed again.
    #[inline(never)]
    pub(crate) fn next(&mut self, cursor: &mut Cursor<'_>, depth: u32, field: &mut Field<List>) -> JsonResult<()> {
        let Self { ids, last } = self;
        let data = cursor.data;
        ids.clear();
        cursor.next_list(depth, field, |cursor, list| {
            if let Some((count, end)) = last.matches(data, list.start()).filter(|&(_, end)| data[end] == b']') {
                list.set(count, count, end);
                cursor.at = end;
                return cursor.next_element().map(drop);
            }
            let end = next_tokens(cursor, depth + 1, ids)?;
            list.set(ids.len(), 0, end);
            Ok(())
        })
    }

    /// There are as many ids as the caller sent and as the engine reports, in this event or in an earlier one.
    /// `count` is the engine's count in this event.
    #[inline]
    pub(crate) fn check_length(
        ids: (&Field<List>, &'static str),
        count: (&Field<u64>, &'static str),
        kept: &Generation,
        options: &Options,
    ) -> Result<(), EventError> {
        if ids.0.is_absent() && kept.prompt_token_ids.is_none() { Ok(()) } else { length(ids, count, kept, options) }
    }

    /// The list does not change an earlier one, and its elements are token ids.
    #[inline]
    pub(crate) fn check(
        &self,
        data: &[u8],
        (field, path): (&Field<List>, &'static str),
        kept: &Generation,
    ) -> Result<(), EventError> {
        if field.is_absent() { Ok(()) } else { self.check_list(data, field, path, kept) }
    }

    /// Keep the list, which has passed every check. Nothing here can fail.
    #[inline]
    pub(crate) fn apply(&mut self, data: &[u8], field: &Field<List>, generation: &mut Generation) {
        if !field.is_absent() {
            self.apply_list(data, field, generation);
        }
    }

    #[inline(never)]
    fn check_list(
        &self,
        data: &[u8],
        field: &Field<List>,
        path: &'static str,
        kept: &Generation,
    ) -> Result<(), EventError> {
        let Some(list) = field.get().filter(|list| list.known() == 0) else { return Ok(()) };
        if let Some(kept) = kept.prompt_token_ids.as_ref().filter(|&kept| *kept != self.ids) {
            let same = self.ids.iter().zip(kept).take_while(|(new, kept)| new == kept).count();
            let message = format!(
                "the prompt has changed: an earlier event had {} tokens, this one has {}, and they differ from token \
                 {same} on",
                kept.len(),
                self.ids.len()
            );
            return Err(EventError::new(ErrorKind::Prefix, field.at(), path, message));
        }
        checks::ids(data, &self.ids, |index| (element_at(data, list.start(), index), format!("{path}[{index}]")))
    }

    #[inline(never)]
    fn apply_list(&mut self, data: &[u8], field: &Field<List>, generation: &mut Generation) {
        let Some(list) = field.get().filter(|list| list.known() == 0) else { return };
        self.last.remember(data, list.start(), list.end(), list.len(), 0);
        if generation.prompt_token_ids.is_none() {
            let mut ids = std::mem::take(&mut self.ids);
            ids.shrink_to_fit();
            generation.prompt_token_ids = Some(ids);
        }
    }
}

#[inline(never)]
fn length(
    (ids, ids_path): (&Field<List>, &'static str),
    (count, count_path): (&Field<u64>, &'static str),
    kept: &Generation,
    options: &Options,
) -> Result<(), EventError> {
    let new = ids.get().map(|list| list.len() as u64);
    let Some(len) = new.or(kept.prompt_token_ids.as_ref().map(|ids| ids.len() as u64)) else { return Ok(()) };
    let (at, path) = if new.is_some() { (ids.at(), ids_path) } else { (count.at(), count_path) };
    let error = |message| Err(EventError::new(ErrorKind::Length, at, path, message));
    if let Some(sent) = options.prompt_len.filter(|&sent| sent != len) {
        return error(format!("the engine reports {len} token ids for the prompt, but {sent} were sent"));
    }
    if let Some(count) = count.get().or(kept.prompt_tokens).filter(|&count| count != len) {
        return error(format!("the engine reports {len} token ids for the prompt, but prompt_tokens is {count}"));
    }
    Ok(())
}
