//! The Python binding of `streamfold-core` and `streamfold-io`: signatures, conversions, exceptions. It has no logic of its own.

mod arrays;
mod durations;
mod errors;
mod event;
mod exchange;
mod experts;
mod generation;
mod generation_fields;
mod options;
mod parser;
mod protocol;
mod py_socket;
#[cfg(target_os = "linux")]
mod reactor;
mod read_rest;
mod request_head;
#[cfg(target_os = "linux")]
mod tls;

use pyo3::prelude::*;

/// The Rust core: parses the bytes of a streamed response into numpy arrays.
#[pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use crate::durations::Durations;
    #[pymodule_export]
    use crate::exchange::Exchange;
    #[pymodule_export]
    use crate::experts::Experts;
    #[pymodule_export]
    use crate::generation::Generation;
    #[pymodule_export]
    use crate::parser::Parser;
    #[pymodule_export]
    use crate::protocol::ConnectionProtocol;
    #[cfg(target_os = "linux")]
    #[pymodule_export]
    use crate::reactor::Reactor;
    #[pymodule_export]
    use crate::read_rest::ReadRest;
    #[pymodule_export]
    use crate::request_head::RequestHead;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let names = streamfold_core::Dialect::ALL.map(|(name, _)| name);
        module.add("DIALECTS", PyTuple::new(module.py(), names)?)
    }
}
