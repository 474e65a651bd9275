use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use streamfold_core::Dtype;

/// How an engine writes routed experts (router replay).
///
/// ``num_layers`` and ``top_k`` give the shape, ``num_experts`` the range that ids are checked against,
/// ``dtype`` the type of one id on the wire (little endian). A dtype that the reply itself tells wins; vLLM's does.
/// An SGLang engine that tells none may not know that another one can be asked for: it sends int32, which is taken
/// too if there are exactly as many bytes.
#[pyclass(frozen, eq, hash, module = "streamfold._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Experts(pub(crate) streamfold_core::Experts);

#[pymethods]
impl Experts {
    #[new]
    #[pyo3(signature = (num_layers, top_k, num_experts=None, dtype="int32"))]
    fn new(num_layers: i64, top_k: i64, num_experts: Option<i64>, dtype: &str) -> PyResult<Self> {
        let positive = |name: &str, value: i64| {
            u32::try_from(value)
                .ok()
                .filter(|&value| value > 0)
                .ok_or_else(|| PyValueError::new_err(format!("{name} must be a positive integer, not {value}")))
        };
        let dtype = Dtype::from_name(dtype).ok_or_else(|| {
            PyValueError::new_err(format!("dtype must be \"int32\", \"uint8\" or \"uint16\", not {dtype:?}"))
        })?;
        Ok(Self(streamfold_core::Experts {
            num_layers: positive("num_layers", num_layers)? as usize,
            top_k: positive("top_k", top_k)? as usize,
            num_experts: num_experts.map(|count| positive("num_experts", count)).transpose()?,
            dtype,
        }))
    }

    /// Layers with experts: the second dimension of the array.
    #[getter]
    fn num_layers(&self) -> usize {
        self.0.num_layers
    }

    /// Experts that a token is routed to in each layer: the third dimension.
    #[getter]
    fn top_k(&self) -> usize {
        self.0.top_k
    }

    /// How many experts a layer has, so that each id is less. None: there is no upper bound.
    #[getter]
    fn num_experts(&self) -> Option<u32> {
        self.0.num_experts
    }

    /// The type of one id on the wire, where the reply does not tell it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    fn __getnewargs__(&self) -> (usize, usize, Option<u32>, &'static str) {
        (self.num_layers(), self.top_k(), self.num_experts(), self.dtype())
    }

    fn __repr__(&self) -> String {
        let num_experts = self.num_experts().map_or("None".to_owned(), |count| count.to_string());
        format!(
            "Experts(num_layers={}, top_k={}, num_experts={num_experts}, dtype='{}')",
            self.num_layers(),
            self.top_k(),
            self.dtype()
        )
    }
}
