//! What the caller says of the stream to parse: dialect, requested data, limits.

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

    /// The type of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Int32, Self::Uint8, Self::Uint16].into_iter().find(|dtype| dtype.name() == name)
    }
}

/// How the engine writes routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Experts {
    /// Layers in each row.
    pub num_layers: usize,
    /// Experts that each token is routed to, in each layer.
    pub top_k: usize,
    /// The range that ids are checked against.
    pub num_experts: Option<u32>,
    /// Used where the reply does not tell the type.
    pub dtype: Dtype,
}

/// What to do with a logprob that stands for minus infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clamped {
    /// It is damage.
    Raise,
    /// Keep it as it came, and count it.
    Keep,
}

/// How an engine writes a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// SGLang, cumulative or incremental: the stream shows which.
    Sglang,
    /// SGLang as it is by default: each event repeats the whole response.
    SglangCumulative,
    /// SGLang with `--incremental-streaming-output`.
    SglangIncremental,
    /// vLLM's token endpoint, `/inference/v1/generate`.
    Vllm,
    /// vLLM's `/v1/completions` with `return_token_ids`.
    VllmCompletions,
}

impl Dialect {
    /// Every dialect, by its name.
    pub const ALL: [(&'static str, Self); 5] = [
        ("sglang", Self::Sglang),
        ("sglang-cumulative", Self::SglangCumulative),
        ("sglang-incremental", Self::SglangIncremental),
        ("vllm", Self::Vllm),
        ("vllm-completions", Self::VllmCompletions),
    ];
}

/// What was asked of the engine, and the limits.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether logprobs were asked for.
    pub logprobs: bool,
    /// Whether routed experts were asked for, and their shape.
    pub experts: Option<Experts>,
    /// The number of tokens sent as the prompt; None if the engine makes them, as from images.
    pub prompt_len: Option<u64>,
    /// The position of the first row of routed experts.
    pub experts_start: u64,
    /// What to do with a logprob that stands for minus infinity.
    pub clamped: Clamped,
    /// Sizes the first buffers.
    pub max_new_tokens: Option<usize>,
    /// The largest event.
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
            max_event_bytes: 1 << 30,
        }
    }
}
