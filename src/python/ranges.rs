//! Ranges in torch's profiler (and, under `torch.autograd.profiler.emit_nvtx`, in Nsight) named after group and kernel.
//! They cost nothing while no profiler runs.

use pyo3::intern;
use pyo3::prelude::*;

use crate::python::reader::Torch;

/// Makes ranges if a profiler runs.
pub struct Ranges<'py>(Option<Bound<'py, PyAny>>);

impl<'py> Ranges<'py> {
    /// Asks torch whether one does.
    pub fn new(py: Python<'py>) -> PyResult<Ranges<'py>> {
        if !Torch::get(py)?.profiler_runs(py) {
            return Ok(Ranges(None));
        }
        let range = py.import("torch._C._profiler").and_then(|module| module.getattr("_RecordFunctionFast"));
        Ok(Ranges(range.ok()))
    }

    /// Opens a range, which lasts as long as what is returned. A range that cannot be opened is no reason not to step.
    pub fn open(&self, name: impl FnOnce() -> String) -> Range<'py> {
        let Some(class) = &self.0 else { return Range(None) };
        let open = || {
            let range = class.call1((name(),))?;
            range.call_method0(intern!(range.py(), "__enter__"))?;
            Ok(range)
        };
        Range(open().inspect_err(|error: &PyErr| error.clone_ref(class.py()).write_unraisable(class.py(), None)).ok())
    }
}

/// An open range.
pub struct Range<'py>(Option<Bound<'py, PyAny>>);

impl Drop for Range<'_> {
    fn drop(&mut self) {
        let Some(range) = &self.0 else { return };
        let py = range.py();
        if let Err(error) = range.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None())) {
            error.write_unraisable(py, Some(range));
        }
    }
}
