//! Which of vLLM's endpoints is read, and where each writes the same thing.

/// Which of vLLM's ways to ask for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// `/inference/v1/generate`.
    Generate,
    /// `/v1/completions` with `return_token_ids`.
    Completions,
}

impl Api {
    /// Where the request's id stands.
    pub(super) fn id_path(self) -> &'static str {
        match self {
            Self::Generate => "request_id",
            Self::Completions => "id",
        }
    }

    /// The list that holds a logprob for each token.
    pub(super) fn list_path(self) -> &'static str {
        match self {
            Self::Generate => "choices[0].logprobs.content",
            Self::Completions => "choices[0].logprobs.token_logprobs",
        }
    }

    pub(super) fn logprob_path(self, index: usize) -> String {
        let member = if self == Self::Generate { ".logprob" } else { "" };
        format!("{}[{index}]{member}", self.list_path())
    }
}
