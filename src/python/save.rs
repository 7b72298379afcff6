//! Reading states for a checkpoint in host memory: fp32 values (int16 for remainders) without copies on the device.

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;

use crate::loader::{Cast, Copy};
use crate::plan::operands::{Scaled, Scaling};
use crate::python::moves::{Move, make};
use crate::python::reader::{Kind, Reader};
use crate::tensor::{Device, Dtype, Layout, View};

/// (state, its factor, target)
type Row<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Bound<'py, PyAny>);

/// Copies states to host memory: each row is (state, its factor for fp16 or None, target). States: fp32, bf16, fp16
/// with a one-element fp32 factor, int16 remainders, Float8Tensors. Targets: CPU tensors of the same shape and layout,
/// int16 for remainders and else fp32. Done when this returns. `progress` is told the bytes of each portion.
/// RuntimeError for tensors that do not belong together, before anything is written.
#[pyfunction]
pub fn save_states<'py>(py: Python<'py>, rows: Vec<Row<'py>>, progress: Option<Py<PyAny>>) -> PyResult<()> {
    let mut reader = Reader::new(py)?;
    let mut moves = Vec::with_capacity(rows.len());
    // What the reader hands out of fp8 tensors lives as long as the copies.
    let mut kept = Vec::new();
    for (state, factor, target) in &rows {
        let to = reader.view(target)?;
        let (from, read) = if reader.kind(state)? == Kind::Plain {
            let from = reader.view(state)?;
            let read = match factor {
                Some(factor) => reader.one("a scale", factor, Dtype::F32, from.device)?.address,
                None => 0,
            };
            (from, read)
        } else {
            let fp8 = reader.fp8(state)?.ok_or_else(|| PyTypeError::new_err("the state is no plain tensor"))?;
            let from = View { dtype: fp8.dtype, ..reader.view(&fp8.data)? };
            let read = reader.one("an fp8 scale_inv", &fp8.scale_inv, Dtype::F32, from.device)?.address;
            kept.extend([fp8.data, fp8.scale_inv]);
            (from, read)
        };
        let cast = Cast { source: from.dtype, target: to.dtype, read: read != 0, write: Scaled::No };
        let known = Cast::all().contains(&cast) && (cast.read || cast.source != Dtype::F16);
        let alike = (from.numel, from.layout) == (to.numel, to.layout) && from.layout != Layout::SCATTERED;
        if !known || !alike || to.device != Device::Cpu {
            return Err(PyRuntimeError::new_err(format!("a state of {from:?} cannot be copied to {to:?}")));
        }
        if from.numel > 0 {
            let (source, target, numel) = (from.address, to.address, from.numel);
            let copy = Copy { cast, numel, source, target, read, scaling: Scaling::default(), absmax: 0 };
            moves.push(Move { copy, from: from.device, to: to.device });
        }
    }
    make(py, &moves, progress)?;
    drop(kept);
    Ok(())
}
