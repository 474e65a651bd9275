use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use streamfold_core::Dtype;

/// Shape and dtype of the routed experts that the engine sends (for router replay, R3).
///
/// ``num_layers`` and ``top_k`` are the last two dimensions of :attr:`Generation.routed_experts`. ``num_experts`` is
/// the number of experts in a layer: ids outside the range are a ``DecodeError``. ``dtype`` is the type of one id on
/// the wire (``"int32"``, ``"uint8"`` or ``"uint16"``, little endian); if the response names its dtype, as vLLM's does,
/// that one is used. Older SGLang versions always send int32: int32 data is accepted too if its size is exactly right.
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

    /// The number of layers with experts: the second dimension of the array.
    #[getter]
    fn num_layers(&self) -> usize {
        self.0.num_layers
    }

    /// The number of experts that a token is routed to in each layer: the third dimension of the array.
    #[getter]
    fn top_k(&self) -> usize {
        self.0.top_k
    }

    /// The number of experts in each layer: ids must be less. None: ids have no upper bound.
    #[getter]
    fn num_experts(&self) -> Option<u32> {
        self.0.num_experts
    }

    /// The type of one id on the wire, if the response does not name it.
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
