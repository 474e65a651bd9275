use numpy::{IntoPyArray, PyArray1, PyUntypedArrayMethods};
use pyo3::exceptions::{PyImportError, PyModuleNotFoundError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};
use streamfold_core::{Matched, RoutedExperts};

use crate::arrays::{float64_array, int32_array};
use crate::generation_fields::{Span, check_padded_rows, checked_experts, checked_top_p, covering_spans};

const FINISH_REASONS: [&str; 3] = ["stop", "length", "abort"];

// rust-numpy makes the arrays: the vector moves into an object that the array owns, so nothing is copied and the array
// is writable and aligned. An `__array_interface__` on a frozen class does the same, but on abi3-py310 `np.asarray`
// takes 5 µs for each array instead of 0.1 µs, because numpy reads a dict of Python objects, and nothing checks that
// dtype and shape fit the buffer.
/// The result of one HTTP call: tokens, logprobs, text and side data.
///
/// Immutable and picklable. The arrays are owned by the caller and writable; ``n`` is the number of tokens.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct Generation {
    /// The sampled tokens, including the stop token: int32 ``[n]``.
    #[pyo3(get)]
    token_ids: Py<PyArray1<i32>>,
    /// The natural log-probability of each token, exactly as sent: float64 ``[n]``; None if not requested.
    #[pyo3(get)]
    logprobs: Option<Py<PyArray1<f64>>>,
    /// The engine's text; None if it sent no text, or if an event with tokens had no text.
    #[pyo3(get)]
    text: Option<Py<PyString>>,
    /// Why the generation ended; None if the stream ended before the engine sent a finish reason.
    #[pyo3(get)]
    finish_reason: Option<&'static str>,
    /// The stop token (int) or stop string (str), if the engine reports it; else None.
    ///
    /// If vLLM's repetition detection ended the generation, vLLM's name for it, such as ``"repetition"``.
    #[pyo3(get)]
    matched: Option<Py<PyAny>>,
    /// The experts that each token was routed to: int32, uint8 or uint16 ``[rows, num_layers, top_k]``.
    ///
    /// ``rows`` is prompt tokens + ``n`` - 1 - ``experts_start``. Flat if the parser was given no ``experts``. None if
    /// the engine did not send them for all tokens. Every slot of a padded row is -1; in the unsigned types 255 or
    /// 65535.
    #[pyo3(get)]
    routed_experts: Option<Py<PyAny>>,
    /// The number of rows in ``routed_experts`` that the engine padded; 0 if the parser was given no ``experts``.
    #[pyo3(get)]
    padded_rows: usize,
    /// The candidates that each token was sampled from: ``(token_ids int32 [m], offsets int32 [n + 1])``.
    ///
    /// Those of token ``i`` are ``token_ids[offsets[i]:offsets[i + 1]]``. None if the engine did not send them for
    /// every token.
    #[pyo3(get)]
    top_p: Option<Py<PyTuple>>,
    /// The weight versions that produced the tokens: ``(version, start, end)``, half-open, in order.
    ///
    /// They cover all tokens. The version is None where the engine reported none, as vLLM does before its last event.
    #[pyo3(get)]
    version_spans: Py<PyList>,
    /// The prompt's tokens as the engine reports them: int32 ``[m]``; None if it did not send them.
    ///
    /// From ``prompt_token_ids``, which SGLang sends with ``return_prompt_token_ids`` and vLLM with
    /// ``return_token_ids``.
    #[pyo3(get)]
    prompt_token_ids: Option<Py<PyArray1<i32>>>,
    /// The number of prompt tokens that the engine reports, the latest value; None if it reports none.
    #[pyo3(get)]
    prompt_tokens: Option<u64>,
    /// The number of prompt tokens read from the engine's prefix cache, the latest value; None if not reported.
    #[pyo3(get)]
    cached_tokens: Option<u64>,
    /// The number of logprobs that are the engine's substitute for minus infinity (0 unless ``clamped="keep"``).
    #[pyo3(get)]
    clamped_logprobs: usize,
    /// The most new tokens that one event of the stream had; 0 if none had tokens.
    ///
    /// More than one with speculative decoding, with a stream interval, and where the engine joined events.
    #[pyo3(get)]
    max_tokens_per_event: usize,
    /// Set once, by the client, before anybody else has the generation; so are the timings.
    missing: PyOnceLock<Py<PyTuple>>,
    timings: PyOnceLock<Py<PyAny>>,
    /// The members of `meta` as JSON. They are parsed at the first access.
    raw_meta: Vec<(String, String)>,
    meta: PyOnceLock<Py<PyDict>>,
}

#[pymethods]
impl Generation {
    #[new]
    #[pyo3(signature = (token_ids, logprobs=None, *, text=None, finish_reason=None, matched=None, routed_experts=None,
                        padded_rows=0, top_p=None, version_spans=None, prompt_token_ids=None, prompt_tokens=None,
                        cached_tokens=None, clamped_logprobs=0, missing=None, max_tokens_per_event=0,
                        timings=None, meta=None))]
    #[allow(clippy::too_many_arguments, reason = "the fields of the contract")]
    fn new(
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        logprobs: Option<&Bound<'_, PyAny>>,
        text: Option<Py<PyString>>,
        finish_reason: Option<&str>,
        matched: Option<Py<PyAny>>,
        routed_experts: Option<Py<PyAny>>,
        padded_rows: usize,
        top_p: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        version_spans: Option<Vec<Span>>,
        prompt_token_ids: Option<&Bound<'_, PyAny>>,
        prompt_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        clamped_logprobs: usize,
        missing: Option<Vec<String>>,
        max_tokens_per_event: usize,
        timings: Option<Py<PyAny>>,
        meta: Option<Py<PyDict>>,
    ) -> PyResult<Self> {
        let token_ids = int32_array("token_ids", token_ids)?;
        let count = token_ids.len();
        let logprobs = logprobs.map(|values| float64_array(values)).transpose()?;
        if let Some(logprobs) = &logprobs
            && logprobs.len() != count
        {
            let message = format!("{} logprobs for {count} token_ids: pass one for each token", logprobs.len());
            return Err(PyValueError::new_err(message));
        }
        let finish_reason = finish_reason
            .map(|reason| {
                FINISH_REASONS.into_iter().find(|known| *known == reason).ok_or_else(|| {
                    PyValueError::new_err(format!("finish_reason must be one of {FINISH_REASONS:?}, not {reason:?}"))
                })
            })
            .transpose()?;
        let top_p = top_p.map(|(ids, offsets)| checked_top_p(py, &ids, &offsets, count)).transpose()?;
        let spans = covering_spans(version_spans.unwrap_or_default(), count)?;
        if let Some(matched) = matched.as_ref().map(|matched| matched.bind(py))
            && !(matched.is_instance_of::<PyInt>() || matched.is_instance_of::<PyString>())
        {
            return Err(PyValueError::new_err(format!("matched must be a token id or a string, not {matched}")));
        }
        let routed_experts = routed_experts.map(|experts| checked_experts(experts.bind(py))).transpose()?;
        check_padded_rows(padded_rows, routed_experts.as_ref().map(|experts| experts.bind(py)))?;
        if max_tokens_per_event > count {
            let message = format!("max_tokens_per_event is {max_tokens_per_event}, but there are {count} token_ids");
            return Err(PyValueError::new_err(message));
        }
        let prompt_token_ids = prompt_token_ids.map(|ids| int32_array("prompt_token_ids", ids)).transpose()?;
        let missing = missing.filter(|names| !names.is_empty());
        let missing = missing.map(|names| PyTuple::new(py, names)).transpose()?.map(Bound::unbind);
        Ok(Self {
            token_ids: token_ids.unbind(),
            logprobs: logprobs.map(Bound::unbind),
            text,
            finish_reason,
            matched,
            routed_experts,
            padded_rows,
            top_p,
            version_spans: PyList::new(py, spans)?.unbind(),
            prompt_token_ids: prompt_token_ids.map(Bound::unbind),
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            missing: once(py, missing),
            max_tokens_per_event,
            timings: once(py, timings),
            raw_meta: Vec::new(),
            meta: once(py, meta),
        })
    }

    /// All other scalars and objects of the response, the latest value of each key.
    ///
    /// Keys of SGLang's event and ``meta_info``, or of vLLM's event, choice and usage, in one dict. If several of them
    /// have the same key, the innermost value counts. Lists are not kept.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let meta = self.meta.get_or_try_init(py, || {
            let members: Vec<_> = self.raw_meta.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
            let json = format!("{{{}}}", members.join(","));
            let parsed = py.import("json")?.call_method1("loads", (json,))?;
            Ok::<_, PyErr>(parsed.cast_into::<PyDict>()?.unbind())
        })?;
        Ok(meta.bind(py).clone())
    }

    /// What was requested and not received, by the names of the fields here; ``()`` if nothing is missing.
    ///
    /// Set by :class:`~streamfold.Client`: ``routed_experts``, ``top_p`` (if sampling is restricted),
    /// ``prompt_token_ids``, and ``indexer_topk`` of ``meta``. Empty without tokens.
    #[getter]
    fn missing(&self, py: Python<'_>) -> Py<PyTuple> {
        self.missing.get(py).map_or_else(|| PyTuple::empty(py).unbind(), |missing| missing.clone_ref(py))
    }

    /// When the tokens came; no part of ``==``. None if no request was sent, and of a :class:`Parser` alone.
    #[getter]
    fn timings(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.timings.get(py).map(|timings| timings.clone_ref(py))
    }

    /// Set what only the client knows, once: before anybody else has the generation.
    fn _complete(&self, py: Python<'_>, missing: Py<PyTuple>, timings: Option<Py<PyAny>>) -> PyResult<()> {
        let timed = timings.map_or(Ok(()), |timings| self.timings.set(py, timings).map_err(drop));
        let named = self.missing.set(py, missing).map_err(drop);
        timed.and(named).map_err(|()| PyValueError::new_err("the generation is complete already"))
    }

    /// The arrays as torch tensors that share their memory. Imports torch.
    ///
    /// Keys: ``token_ids``, ``logprobs``, ``routed_experts``, ``prompt_token_ids``, ``top_p_token_ids`` and
    /// ``top_p_offsets``. Arrays that are None are left out. Raises ``ImportError`` without torch.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let torch = py.import("torch").map_err(|error| explain_missing_torch(py, error))?;
        let from_numpy = torch.getattr("from_numpy")?;
        let tensors = PyDict::new(py);
        tensors.set_item("token_ids", from_numpy.call1((&self.token_ids,))?)?;
        if let Some(logprobs) = &self.logprobs {
            tensors.set_item("logprobs", from_numpy.call1((logprobs,))?)?;
        }
        if let Some(experts) = &self.routed_experts {
            tensors.set_item("routed_experts", from_numpy.call1((experts,))?)?;
        }
        if let Some(ids) = &self.prompt_token_ids {
            tensors.set_item("prompt_token_ids", from_numpy.call1((ids,))?)?;
        }
        if let Some(top_p) = &self.top_p {
            for (name, array) in ["top_p_token_ids", "top_p_offsets"].into_iter().zip(top_p.bind(py)) {
                tensors.set_item(name, from_numpy.call1((array,))?)?;
            }
        }
        Ok(tensors)
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        // Without `..`: a field that is forgotten here does not compile.
        let Self {
            token_ids,
            logprobs,
            text,
            finish_reason,
            matched,
            routed_experts,
            padded_rows,
            top_p,
            version_spans,
            prompt_token_ids,
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            missing: _,
            max_tokens_per_event,
            timings,
            raw_meta: _,
            meta: _,
        } = self;
        let args = (token_ids, logprobs).into_pyobject(py)?;
        let kwargs = PyDict::new(py);
        kwargs.set_item("text", text)?;
        kwargs.set_item("finish_reason", finish_reason)?;
        kwargs.set_item("matched", matched)?;
        kwargs.set_item("routed_experts", routed_experts)?;
        kwargs.set_item("padded_rows", padded_rows)?;
        kwargs.set_item("top_p", top_p)?;
        kwargs.set_item("version_spans", version_spans)?;
        kwargs.set_item("prompt_token_ids", prompt_token_ids)?;
        kwargs.set_item("prompt_tokens", prompt_tokens)?;
        kwargs.set_item("cached_tokens", cached_tokens)?;
        kwargs.set_item("clamped_logprobs", clamped_logprobs)?;
        kwargs.set_item("missing", self.missing(py).bind(py).to_list())?; // of tuples only those of arrays are compared
        kwargs.set_item("max_tokens_per_event", max_tokens_per_event)?;
        kwargs.set_item("timings", timings.get(py))?;
        kwargs.set_item("meta", self.meta(py)?)?;
        Ok((args, kwargs))
    }

    /// Compares all fields but the timings; arrays bit by bit, so that a logprob of -0.0 does not equal 0.0.
    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let Ok(other) = other.cast::<Self>() else { return Ok(py.NotImplemented()) };
        let is_equal = self.comparable(py)?.eq(other.get().comparable(py)?)?;
        Ok(is_equal.into_pyobject(py)?.to_owned().into_any().unbind())
    }

    /// Three lines at most: counts and shapes, no arrays.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        // Without `..`: a field that is forgotten here does not compile.
        let Self {
            token_ids,
            logprobs,
            text,
            finish_reason,
            matched,
            routed_experts,
            padded_rows,
            top_p,
            version_spans,
            prompt_token_ids,
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            missing,
            max_tokens_per_event,
            timings,
            raw_meta: _,
            meta: _,
        } = self;
        let mut ending = Vec::new();
        ending
            .push(format!("finish_reason={}", finish_reason.map_or("None".to_owned(), |reason| format!("'{reason}'"))));
        if let Some(matched) = matched {
            ending.push(format!("matched={}", clipped(matched.bind(py))?));
        }
        if let Some(text) = text {
            let text = text.bind(py);
            ending.push(format!("text={} ({} characters)", clipped(text)?, text.len()?));
        }
        let mut arrays = Vec::new();
        let top_p = top_p.as_ref().map(|top_p| top_p.bind(py).get_item(0)).transpose()?;
        for (name, array) in [
            ("logprobs", logprobs.as_ref().map(|array| array.bind(py).as_any())),
            ("routed_experts", routed_experts.as_ref().map(|array| array.bind(py))),
            ("top_p", top_p.as_ref()),
            ("prompt_token_ids", prompt_token_ids.as_ref().map(|array| array.bind(py).as_any())),
        ] {
            if let Some(array) = array {
                let shape: Vec<usize> = array.getattr("shape")?.extract()?;
                arrays.push(format!("{name}={}{shape:?}", array.getattr("dtype")?));
            }
        }
        let mut counts = vec![format!("version_spans={}", version_spans.bind(py).len())];
        for (name, count) in [("prompt_tokens", prompt_tokens), ("cached_tokens", cached_tokens)] {
            counts.extend(count.map(|count| format!("{name}={count}")));
        }
        if *padded_rows > 0 {
            counts.push(format!("padded_rows={padded_rows}"));
        }
        if let Some(missing) = missing.get(py).map(|missing| missing.bind(py)).filter(|missing| !missing.is_empty()) {
            counts.push(format!("missing={}", missing.repr()?));
        }
        if *max_tokens_per_event > 1 {
            counts.push(format!("max_tokens_per_event={max_tokens_per_event}"));
        }
        if let Some(timings) = timings.get(py) {
            counts.extend(Some(timings.bind(py).str()?.to_string()).filter(|told| !told.is_empty()));
        }
        counts.push(format!("clamped_logprobs={clamped_logprobs}, meta={} keys", self.meta(py)?.len()));
        let count = token_ids.bind(py).len();
        let lines = [ending, arrays, counts].map(|parts| parts.join(", "));
        let lines: Vec<_> = lines.into_iter().filter(|line| !line.is_empty()).collect();
        Ok(format!("<Generation of {count} tokens, {}>", lines.join(",\n ")))
    }
}

impl Generation {
    /// Convert the core's generation. Arrays are moved, not copied.
    pub(crate) fn from_core(
        py: Python<'_>,
        inner: streamfold_core::Generation,
        experts: Option<streamfold_core::Experts>,
    ) -> PyResult<Bound<'_, Self>> {
        // Without `..`: a field that is forgotten here does not compile.
        let streamfold_core::Generation {
            token_ids,
            logprobs,
            text,
            finish_reason,
            matched,
            routed_experts,
            expert_rows,
            padded_rows,
            top_p,
            version_spans,
            prompt_token_ids,
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            max_tokens_per_event,
            meta,
        } = inner;
        let shape = expert_rows.zip(experts).map(|(rows, experts)| (rows, experts.num_layers, experts.top_k));
        let routed_experts = routed_experts.map(|experts| {
            let flat = match experts {
                RoutedExperts::Int32(ids) => ids.into_pyarray(py).into_any(),
                RoutedExperts::Uint8(ids) => ids.into_pyarray(py).into_any(),
                RoutedExperts::Uint16(ids) => ids.into_pyarray(py).into_any(),
            };
            shape.map_or(Ok(flat.clone()), |shape| flat.call_method1("reshape", (shape,)))
        });
        let top_p = top_p.map(|top_p| {
            let arrays = [top_p.ids.into_pyarray(py).into_any(), top_p.offsets.into_pyarray(py).into_any()];
            PyTuple::new(py, arrays)
        });
        let matched = matched.map(|matched| match matched {
            Matched::Token(id) => id.into_pyobject(py).map(|id| id.into_any().unbind()),
            Matched::Text(text) => text.into_pyobject(py).map(|text| text.into_any().unbind()),
        });
        let spans = version_spans.into_iter().map(|span| (span.version, span.start, span.end));
        let generation = Self {
            token_ids: token_ids.into_pyarray(py).unbind(),
            logprobs: logprobs.map(|logprobs| logprobs.into_pyarray(py).unbind()),
            text: text.map(|text| PyString::new(py, &text).unbind()),
            finish_reason: finish_reason.map(streamfold_core::FinishReason::name),
            matched: matched.transpose().map_err(PyErr::from)?,
            routed_experts: routed_experts.transpose()?.map(Bound::unbind),
            padded_rows,
            top_p: top_p.transpose()?.map(Bound::unbind),
            version_spans: PyList::new(py, spans.collect::<Vec<_>>())?.unbind(),
            prompt_token_ids: prompt_token_ids.map(|ids| ids.into_pyarray(py).unbind()),
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            missing: PyOnceLock::new(),
            max_tokens_per_event,
            timings: PyOnceLock::new(),
            raw_meta: meta,
            meta: PyOnceLock::new(),
        };
        Bound::new(py, generation)
    }

    /// All fields that are compared as a list, with each array as its dtype, shape and bytes.
    fn comparable<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (args, kwargs) = self.__getnewargs_ex__(py)?;
        kwargs.del_item("timings")?; // the same tokens at another time
        let fields = PyList::empty(py);
        let top_p = kwargs.get_item("top_p")?.and_then(|top_p| top_p.cast_into::<PyTuple>().ok());
        for field in args.iter().chain(kwargs.values().iter()).chain(top_p.iter().flatten()) {
            if field.hasattr("tobytes")? {
                let parts = (field.getattr("dtype")?.str()?, field.getattr("shape")?, field.call_method0("tobytes")?);
                fields.append(parts)?;
            } else if !field.is_instance_of::<PyTuple>() {
                fields.append(field)?;
            }
        }
        Ok(fields)
    }
}

/// A cell that holds the value, if there is one.
fn once<T>(py: Python<'_>, value: Option<T>) -> PyOnceLock<T> {
    let cell = PyOnceLock::new();
    if let Some(value) = value {
        let _ = cell.set(py, value);
    }
    cell
}

/// The repr of a value, if it is short; else its beginning.
fn clipped(value: &Bound<'_, PyAny>) -> PyResult<String> {
    const LONGEST: usize = 50;
    let repr = value.repr()?.to_string();
    Ok(match repr.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &repr[..end]),
        None => repr,
    })
}

/// Name the extra if torch is not installed. If it is, and cannot be imported, that error says why.
fn explain_missing_torch(py: Python<'_>, error: PyErr) -> PyErr {
    let is_missing = error.is_instance_of::<PyModuleNotFoundError>(py)
        && error.value(py).getattr("name").is_ok_and(|name| name.eq("torch").unwrap_or(false));
    if !is_missing {
        return error;
    }
    let explained = PyImportError::new_err("Generation.torch() needs torch: pip install 'streamfold[torch]'");
    explained.set_cause(py, Some(error));
    explained
}
