//! The options of a parser: the dialect of the stream, what was requested from the engine, and limits.

/// The type of one routed expert on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 4 bytes.
    Int32,
    /// 1 byte.
    Uint8,
    /// 2 bytes.
    Uint16,
}

impl Dtype {
    /// The name that numpy and the wire use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int32 => "int32",
            Self::Uint8 => "uint8",
            Self::Uint16 => "uint16",
        }
    }

    /// The bytes of one number.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::Int32 => 4,
            Self::Uint8 => 1,
            Self::Uint16 => 2,
        }
    }

    /// The type with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Int32, Self::Uint8, Self::Uint16].into_iter().find(|dtype| dtype.name() == name)
    }
}

/// Shape and type of the routed experts that the engine sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Experts {
    /// The number of layers in each row.
    pub num_layers: usize,
    /// The number of experts that each token is routed to, in each layer.
    pub top_k: usize,
    /// The number of experts: each id must be less. None: ids have no upper bound.
    pub num_experts: Option<u32>,
    /// The type of an id, if the response does not name it.
    pub dtype: Dtype,
}

/// What to do with a logprob that is the engine's substitute for minus infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clamped {
    /// Report an error.
    Raise,
    /// Keep the value as sent, and count it.
    Keep,
}

/// How an engine writes a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// SGLang, cumulative or incremental: detected from the stream.
    Sglang,
    /// SGLang's default: each event repeats the whole response.
    SglangCumulative,
    /// SGLang with `--incremental-streaming-output`: each event holds only the new tokens.
    SglangIncremental,
    /// vLLM's token endpoint, `/inference/v1/generate`.
    Vllm,
    /// vLLM's `/v1/completions` with `return_token_ids`.
    VllmCompletions,
}

impl Dialect {
    /// Every dialect with its name.
    pub const ALL: [(&'static str, Self); 5] = [
        ("sglang", Self::Sglang),
        ("sglang-cumulative", Self::SglangCumulative),
        ("sglang-incremental", Self::SglangIncremental),
        ("vllm", Self::Vllm),
        ("vllm-completions", Self::VllmCompletions),
    ];
}

/// What was requested from the engine, and limits.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether logprobs were requested.
    pub logprobs: bool,
    /// The shape of routed experts, if they were requested.
    pub experts: Option<Experts>,
    /// The number of prompt tokens sent. None if the engine computes them, for example from images.
    pub prompt_len: Option<u64>,
    /// The position of the first row of routed experts (the number of prompt tokens before it).
    pub experts_start: u64,
    /// What to do with a logprob that is the engine's substitute for minus infinity.
    pub clamped: Clamped,
    /// The number of tokens to reserve space for when the first ones arrive. It is not a limit.
    pub max_new_tokens: Option<usize>,
    /// The event with which the stream has more tokens than this is its last: the generation ends with it.
    pub token_limit: Option<usize>,
    /// The largest event, in bytes.
    pub max_event_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            logprobs: true,
            experts: None,
            prompt_len: None,
            experts_start: 0,
            clamped: Clamped::Raise,
            max_new_tokens: None,
            token_limit: None,
            max_event_bytes: 1 << 30,
        }
    }
}
