//! The paths of SGLang's fields that several modules name in errors.

use crate::sglang::keys::{EventKey, MetaKey};

pub(super) const IDS: &str = EventKey::OutputIds.path();
pub(super) const PROMPT_IDS: &str = EventKey::PromptTokenIds.path();
pub(super) const PROMPT_TOKENS: &str = MetaKey::PromptTokens.path();
pub(super) const PAIRS: &str = MetaKey::Pairs.path();
pub(super) const LENGTH: &str = MetaKey::Length.path();
pub(super) const COMPLETION: &str = MetaKey::CompletionTokens.path();
pub(super) const FINISH: &str = MetaKey::FinishReason.path();
