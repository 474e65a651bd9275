//! vLLM's two endpoints that return token ids, and the paths where they differ.

/// The endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// `/inference/v1/generate`.
    Generate,
    /// `/v1/completions` with `return_token_ids`.
    Completions,
}

impl Api {
    /// The path of the request id.
    pub(super) fn id_path(self) -> &'static str {
        match self {
            Self::Generate => "request_id",
            Self::Completions => "id",
        }
    }

    /// The path of the list with a logprob for each token.
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
