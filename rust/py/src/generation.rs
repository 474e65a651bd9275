use numpy::{IntoPyArray, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};
use streamfold_core::{Matched, RoutedExperts};

const FINISH_REASONS: [&str; 3] = ["stop", "length", "abort"];

// Arrays are made by rust-numpy: the vector moves into an object that the array keeps, so nothing is copied, and
// the array is writable, aligned, and its own. An `__array_interface__` on a frozen class does the same; both were
// tried on abi3-py310. There `np.asarray` takes 5 µs an array instead of 0.1, since numpy asks for a dict of Python
// objects, and a dtype or shape that disagrees with the buffer is found by nobody.
/// What one HTTP call produced. Immutable and picklable; its arrays belong to the caller and are writable.
#[pyclass(frozen, module = "streamfold._core")]
pub(crate) struct Generation {
    /// The sampled tokens, stop token included: int32 ``[n]``.
    #[pyo3(get)]
    token_ids: Py<PyArray1<i32>>,
    /// One natural logarithm per token, float64 ``[n]``, exactly as sent; None if not asked for.
    #[pyo3(get)]
    logprobs: Option<Py<PyArray1<f64>>>,
    /// The engine's text; None if it sent none (or left it out of an event that brought tokens).
    #[pyo3(get)]
    text: Option<Py<PyString>>,
    /// Why the engine ended it; None if the stream was cut before it said so.
    #[pyo3(get)]
    finish_reason: Option<&'static str>,
    /// The stop token or stop string, if the engine told; of a repetition that vLLM ended, its word for that.
    #[pyo3(get)]
    matched: Option<Py<PyAny>>,
    /// int32, uint8 or uint16 ``[rows, num_layers, top_k]``; flat if the parser was given no ``experts``.
    #[pyo3(get)]
    routed_experts: Option<Py<PyAny>>,
    /// ``(token_ids int32 [m], offsets int32 [n + 1])``: the ids that sampling could choose, per token.
    #[pyo3(get)]
    top_p: Option<Py<PyTuple>>,
    /// ``(weight version, start, end)`` over this call's tokens, half open, in order.
    #[pyo3(get)]
    version_spans: Py<PyList>,
    /// The prompt's tokens as the engine sent them: int32 ``[m]``; None if it did not send them.
    #[pyo3(get)]
    prompt_token_ids: Option<Py<PyArray1<i32>>>,
    /// The length of the prompt, as last told by the engine.
    #[pyo3(get)]
    prompt_tokens: Option<u64>,
    /// How many tokens of the prompt came from the engine's cache, as last told.
    #[pyo3(get)]
    cached_tokens: Option<u64>,
    /// How many logprobs were the engine's stand-in for minus infinity (only with ``clamped="keep"``).
    #[pyo3(get)]
    clamped_logprobs: usize,
    /// The members of `meta` as JSON, until somebody asks.
    raw_meta: Vec<(String, String)>,
    meta: PyOnceLock<Py<PyDict>>,
}

#[pymethods]
impl Generation {
    #[new]
    #[pyo3(signature = (token_ids, logprobs=None, *, text=None, finish_reason=None, matched=None, routed_experts=None,
                        top_p=None, version_spans=None, prompt_token_ids=None, prompt_tokens=None, cached_tokens=None,
                        clamped_logprobs=0, meta=None))]
    #[allow(clippy::too_many_arguments, reason = "the fields of the contract")]
    fn new(
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        logprobs: Option<&Bound<'_, PyAny>>,
        text: Option<Py<PyString>>,
        finish_reason: Option<&str>,
        matched: Option<Py<PyAny>>,
        routed_experts: Option<Py<PyAny>>,
        top_p: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        version_spans: Option<Vec<(String, usize, usize)>>,
        prompt_token_ids: Option<&Bound<'_, PyAny>>,
        prompt_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        clamped_logprobs: usize,
        meta: Option<Py<PyDict>>,
    ) -> PyResult<Self> {
        let token_ids = int32_array("token_ids", token_ids)?;
        let count = token_ids.len();
        let logprobs = logprobs.map(|values| float64_array(values)).transpose()?;
        if let Some(logprobs) = &logprobs
            && logprobs.len() != count
        {
            let message = format!("{} logprobs for {count} token_ids: give one for each", logprobs.len());
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
        let spans = version_spans.unwrap_or_default();
        check_spans(&spans, count)?;
        if let Some(matched) = matched.as_ref().map(|matched| matched.bind(py))
            && !(matched.is_instance_of::<PyInt>() || matched.is_instance_of::<PyString>())
        {
            return Err(PyValueError::new_err(format!("matched must be a token id or a string, not {matched}")));
        }
        let routed_experts = routed_experts.map(|experts| checked_experts(experts.bind(py))).transpose()?;
        let prompt_token_ids = prompt_token_ids.map(|ids| int32_array("prompt_token_ids", ids)).transpose()?;
        let given = PyOnceLock::new();
        if let Some(meta) = meta {
            let _ = given.set(py, meta);
        }
        Ok(Self {
            token_ids: token_ids.unbind(),
            logprobs: logprobs.map(Bound::unbind),
            text,
            finish_reason,
            matched,
            routed_experts,
            top_p,
            version_spans: PyList::new(py, spans)?.unbind(),
            prompt_token_ids: prompt_token_ids.map(Bound::unbind),
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            raw_meta: Vec::new(),
            meta: given,
        })
    }

    /// Every other scalar or object that the engine told, the latest value of each key.
    ///
    /// vLLM's event, choice and usage together; of a key in several of them the innermost counts.
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

    /// The arrays as tensors over the same memory, where torch knows the dtype (imports torch here).
    ///
    /// Keys: ``token_ids``, ``logprobs``, ``routed_experts``, ``prompt_token_ids``, ``top_p_token_ids``,
    /// ``top_p_offsets``; those that are None are left out.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let from_numpy = py.import("torch")?.getattr("from_numpy")?;
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
            top_p,
            version_spans,
            prompt_token_ids,
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            raw_meta: _,
            meta: _,
        } = self;
        let args = (token_ids, logprobs).into_pyobject(py)?;
        let kwargs = PyDict::new(py);
        kwargs.set_item("text", text)?;
        kwargs.set_item("finish_reason", finish_reason)?;
        kwargs.set_item("matched", matched)?;
        kwargs.set_item("routed_experts", routed_experts)?;
        kwargs.set_item("top_p", top_p)?;
        kwargs.set_item("version_spans", version_spans)?;
        kwargs.set_item("prompt_token_ids", prompt_token_ids)?;
        kwargs.set_item("prompt_tokens", prompt_tokens)?;
        kwargs.set_item("cached_tokens", cached_tokens)?;
        kwargs.set_item("clamped_logprobs", clamped_logprobs)?;
        kwargs.set_item("meta", self.meta(py)?)?;
        Ok((args, kwargs))
    }

    /// Bit for bit: a logprob of -0.0 is not one of 0.0.
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
            top_p,
            version_spans,
            prompt_token_ids,
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
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
        counts.push(format!("clamped_logprobs={clamped_logprobs}, meta={} keys", self.meta(py)?.len()));
        let count = token_ids.bind(py).len();
        let lines = [ending, arrays, counts].map(|parts| parts.join(", "));
        let lines: Vec<_> = lines.into_iter().filter(|line| !line.is_empty()).collect();
        Ok(format!("<Generation of {count} tokens, {}>", lines.join(",\n ")))
    }
}

impl Generation {
    /// Hand the arrays over; none is copied.
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
            top_p,
            version_spans,
            prompt_token_ids,
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
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
            top_p: top_p.transpose()?.map(Bound::unbind),
            version_spans: PyList::new(py, spans.collect::<Vec<_>>())?.unbind(),
            prompt_token_ids: prompt_token_ids.map(|ids| ids.into_pyarray(py).unbind()),
            prompt_tokens,
            cached_tokens,
            clamped_logprobs,
            raw_meta: meta,
            meta: PyOnceLock::new(),
        };
        Bound::new(py, generation)
    }

    /// All fields, each array as its dtype, shape and bytes.
    fn comparable<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (args, kwargs) = self.__getnewargs_ex__(py)?;
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

/// The repr of a value, if it is short; else its beginning.
fn clipped(value: &Bound<'_, PyAny>) -> PyResult<String> {
    const LONGEST: usize = 50;
    let repr = value.repr()?.to_string();
    Ok(match repr.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &repr[..end]),
        None => repr,
    })
}

/// A new array of int32, of values that are token ids or offsets.
fn int32_array<'py>(name: &str, values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
    if let Ok(array) = values.cast::<PyArray1<i32>>() {
        let array = owned(array)?;
        return match array.readonly().as_slice()?.iter().find(|&&value| value < 0) {
            None => Ok(array),
            Some(_) => Err(beyond_int32(name)),
        };
    }
    let py = values.py();
    let values: Vec<i64> = values.extract()?;
    let narrowed = values.into_iter().map(|value| i32::try_from(value).ok().filter(|&value| value >= 0));
    Ok(narrowed.collect::<Option<Vec<_>>>().ok_or_else(|| beyond_int32(name))?.into_pyarray(py))
}

fn beyond_int32(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name} must lie in 0 … 2147483647"))
}

fn float64_array<'py>(values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f64>>> {
    if let Ok(array) = values.cast::<PyArray1<f64>>() {
        return owned(array);
    }
    let py = values.py();
    Ok(values.extract::<Vec<f64>>()?.into_pyarray(py))
}

/// A copy that nobody else has, writable, aligned, in C order, whatever the array was: a view, or read-only memory
/// out of a pickle.
fn owned<'py, T: numpy::Element>(array: &Bound<'py, PyArray1<T>>) -> PyResult<Bound<'py, PyArray1<T>>> {
    Ok(array.call_method1("copy", ("C",))?.cast_into()?)
}

/// Spans follow each other, may leave gaps, and lie within the tokens.
fn check_spans(spans: &[(String, usize, usize)], count: usize) -> PyResult<()> {
    let mut last = 0;
    for (version, start, end) in spans {
        if *start < last || start > end || *end > count {
            let message = format!(
                "version_spans: {version:?} covers {start}..{end} of {count} tokens, after one that ends at {last}"
            );
            return Err(PyValueError::new_err(message));
        }
        last = *end;
    }
    Ok(())
}

fn checked_experts(experts: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    let dtype = experts.cast::<PyUntypedArray>().map(|array| array.dtype().to_string()).unwrap_or_default();
    if streamfold_core::Dtype::from_name(&dtype).is_some() {
        return Ok(experts.call_method1("copy", ("C",))?.unbind());
    }
    Err(PyValueError::new_err("routed_experts must be a numpy array of int32, uint8 or uint16"))
}

fn checked_top_p(
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
            "top_p offsets must number {} (tokens + 1), start at 0, never fall, and end at the number of ids",
            count + 1
        );
        return Err(PyValueError::new_err(message));
    }
    Ok(PyTuple::new(py, [ids.into_any(), offsets.into_any()])?.unbind())
}
