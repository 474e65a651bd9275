//! Arrays of numbers that Python code gives.

use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A new int32 array of values that must not be negative.
pub(crate) fn int32_array<'py>(name: &str, values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
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
    PyValueError::new_err(format!("{name} must be integers in 0 … 2147483647"))
}

pub(crate) fn float64_array<'py>(values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<f64>>> {
    if let Ok(array) = values.cast::<PyArray1<f64>>() {
        return owned(array);
    }
    let py = values.py();
    Ok(values.extract::<Vec<f64>>()?.into_pyarray(py))
}

/// A copy that is writable, aligned and in C order, also of a view and of read-only memory from a pickle.
fn owned<'py, T: numpy::Element>(array: &Bound<'py, PyArray1<T>>) -> PyResult<Bound<'py, PyArray1<T>>> {
    Ok(array.call_method1("copy", ("C",))?.cast_into()?)
}
