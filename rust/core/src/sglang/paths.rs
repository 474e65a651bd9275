//! The names of SGLang's fields, as errors give them.

pub(super) const PAIRS: &str = "meta_info.output_token_logprobs";
pub(super) const IDS: &str = "output_ids";
pub(super) const LENGTH: &str = "meta_info.output_token_logprobs_length";
pub(super) const COMPLETION: &str = "meta_info.completion_tokens";
pub(super) const FINISH: &str = "meta_info.finish_reason";
