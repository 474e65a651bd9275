//! Checks of the arguments that a [`Generation`](crate::generation::Generation) is made of in Python.

use numpy::{PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::int32_array;

/// A weight version, or None, and the tokens that it produced.
pub(crate) type Span = (Option<String>, usize, usize);

/// Spans in order and within the tokens; gaps get a span without a version.
pub(crate) fn covering_spans(spans: Vec<Span>, count: usize) -> PyResult<Vec<Span>> {
    let mut last = 0;
    let mut covering = Vec::with_capacity(spans.len());
    for (version, start, end) in spans {
        if start < last || start > end || end > count {
            let version = version.map_or("None".to_owned(), |version| format!("{version:?}"));
            let message = format!(
                "version_spans must be in order and within the {count} tokens, but {version} covers {start}..{end} \
                 after a span that ends at {last}"
            );
            return Err(PyValueError::new_err(message));
        }
        if start == end {
            continue;
        }
        if last < start {
            covering.push((None, last, start));
        }
        covering.push((version, start, end));
        last = end;
    }
    if last < count {
        covering.push((None, last, count));
    }
    Ok(covering)
}

pub(crate) fn checked_experts(experts: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    let dtype = experts.cast::<PyUntypedArray>().map(|array| array.dtype().to_string()).unwrap_or_default();
    if streamfold_core::Dtype::from_name(&dtype).is_some() {
        return Ok(experts.call_method1("copy", ("C",))?.unbind());
    }
    Err(PyValueError::new_err("routed_experts must be a numpy array of int32, uint8 or uint16"))
}

pub(crate) fn check_padded_rows(padded_rows: usize, experts: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    if padded_rows == 0 {
        return Ok(());
    }
    let rows = experts.map_or(Ok(0), PyAnyMethods::len)?;
    if padded_rows <= rows {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("padded_rows is {padded_rows}, but there are {rows} rows of routed experts")))
}

pub(crate) fn checked_top_p(
    py: Python<'_>,
    ids: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    count: usize,
) -> PyResult<Py<PyTuple>> {
    let (ids, offsets) = (int32_array("top_p", ids)?, int32_array("top_p", offsets)?);
    let ends = offsets.readonly();
    let ends = ends.as_slice()?;
    let is_sound = ends.len() == count + 1
        && ends[0] == 0
        && ends.is_sorted()
        && usize::try_from(ends[count]).is_ok_and(|end| end == ids.len());
    if !is_sound {
        let message = format!(
            "top_p must have {} offsets (tokens + 1) that start at 0, never decrease, and end at the number of ids",
            count + 1
        );
        return Err(PyValueError::new_err(message));
    }
    Ok(PyTuple::new(py, [ids.into_any(), offsets.into_any()])?.unbind())
}
