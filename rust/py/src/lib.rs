//! The Python face of `streamfold-core`: signatures, conversion, one error map, nothing else.

mod errors;
mod experts;
mod generation;
mod parser;

use pyo3::prelude::*;

/// The Rust core: raw bytes of a streamed reply in, arrays out.
#[pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use crate::experts::Experts;
    #[pymodule_export]
    use crate::generation::Generation;
    #[pymodule_export]
    use crate::parser::Parser;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let names = streamfold_core::Dialect::ALL.map(|(name, _)| name);
        module.add("DIALECTS", PyTuple::new(module.py(), names)?)
    }
}
