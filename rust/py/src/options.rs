//! The keywords of `Parser` and `Exchange.stream` to the core's options.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use streamfold_core::{Clamped, Dialect, Options};

use crate::experts::Experts;

/// What the keywords say of a stream.
pub(crate) struct StreamOptions {
    pub name: &'static str,
    pub dialect: Dialect,
    pub options: Options,
}

impl StreamOptions {
    #[allow(clippy::too_many_arguments, reason = "the contract's keywords")]
    pub(crate) fn new(
        dialect: &str,
        logprobs: bool,
        experts: Option<&Bound<'_, Experts>>,
        prompt_len: Option<i64>,
        experts_start: i64,
        clamped: &str,
        max_new_tokens: Option<i64>,
        token_limit: Option<i64>,
        max_event_bytes: i64,
    ) -> PyResult<Self> {
        let Some((name, dialect)) = Dialect::ALL.into_iter().find(|(name, _)| *name == dialect) else {
            let names = Dialect::ALL.map(|(name, _)| format!("{name:?}")).join(", ");
            return Err(PyValueError::new_err(format!("dialect must be one of {names}, not {dialect:?}")));
        };
        let clamped = match clamped {
            "raise" => Clamped::Raise,
            "keep" => Clamped::Keep,
            _ => return Err(PyValueError::new_err(format!("clamped must be \"raise\" or \"keep\", not {clamped:?}"))),
        };
        let options = Options {
            logprobs,
            experts: experts.map(|experts| experts.get().0),
            prompt_len: prompt_len.map(|count| natural("prompt_len", count)).transpose()?,
            experts_start: natural("experts_start", experts_start)?,
            clamped,
            max_new_tokens: max_new_tokens.map(|count| natural("max_new_tokens", count)).transpose()?,
            token_limit: token_limit.map(|count| natural("token_limit", count)).transpose()?,
            max_event_bytes: natural("max_event_bytes", max_event_bytes)?,
        };
        Ok(Self { name, dialect, options })
    }
}

/// A count that must not be negative.
pub(crate) fn natural<T: TryFrom<i64>>(name: &str, value: i64) -> PyResult<T> {
    T::try_from(value).map_err(|_| PyValueError::new_err(format!("{name} must not be negative, but it is {value}")))
}
