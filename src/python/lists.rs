//! The step on explicit lists, as Transformer Engine's native functions take them: for the comparison with stock and for
//! its stand-in on machines without a GPU. And the arithmetic alone, on NumPy arrays.

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::cpu::arithmetic::adam_update;
use crate::options::{Header, Live, Options, Scalars};
use crate::plan::GroupPlan;
use crate::plan::column::{Column, Master, Verdict, Work};
use crate::plan::operands::Scaling;
use crate::python::device::{Run, master_from, parameter_bytes};
use crate::python::faults::{Place, raise, role};
use crate::python::reader::Reader;
use crate::tensor::{Device, Dtype};

/// A tensor, or a scaled one as a tuple with what scales it, one fp32 element each: (float16, factor); a float8 state as
/// (data, factor, scale, scale_inv, amax); a float8 parameter as (data, scale, scale_inv, amax).
#[derive(FromPyObject)]
pub enum Entry<'py> {
    Scaled(Vec<Bound<'py, PyAny>>),
    Plain(Bound<'py, PyAny>),
}

impl<'py> Entry<'py> {
    fn tensor(&self) -> PyResult<&Bound<'py, PyAny>> {
        match self {
            Entry::Plain(tensor) => Ok(tensor),
            Entry::Scaled(parts) => parts.first().ok_or_else(|| PyRuntimeError::new_err("an empty tuple is no tensor")),
        }
    }

    fn scaling(&self, reader: &Reader<'py>, device: Device) -> PyResult<Scaling> {
        let Entry::Scaled(parts) = self else { return Ok(Scaling::default()) };
        let at = |index: usize| PyResult::Ok(reader.one("scaling", &parts[index], Dtype::F32, device)?.address);
        Ok(match parts.len() {
            2 => Scaling { factor: at(1)?, ..Scaling::default() },
            4 => Scaling { factor: 0, scale: at(1)?, scale_inv: at(2)?, amax: at(3)? },
            5 => Scaling { factor: at(1)?, scale: at(2)?, scale_inv: at(3)?, amax: at(4)? },
            other => return Err(PyRuntimeError::new_err(format!("a scaled tensor has 2, 4 or 5 parts, got {other}"))),
        })
    }
}

/// Adam on lists of plain tensors: [gradients, parameters, exp_avg, exp_avg_sq] and, as a fifth, masters or remainders as
/// `master` says ("none", "float32", "float16", "idle float16", "remainder"). `mode` is 1 for AdamW, 0 for L2; `step`
/// counts from 1. On the tensors' own device, on torch's current stream. Gradients: float32, float16, bfloat16;
/// parameters also float8; moments float32, bfloat16, scaled float16 and float8. RuntimeError for lists of unequal lengths
/// and tensors that do not belong together; nothing has changed then.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the signature is Transformer Engine's")]
pub fn multi_tensor_adam<'py>(
    py: Python<'py>,
    tensor_lists: Vec<Vec<Entry<'py>>>,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    step: i64,
    mode: i64,
    bias_correction: i64,
    weight_decay: f64,
    master: &str,
) -> PyResult<()> {
    let kind = master_from(master)?;
    let (bias_correction, adam_w) = (bias_correction != 0, mode == 1);
    let options = Options { lr, beta1, beta2, eps, weight_decay, bias_correction, adam_w, step };
    let reader = Reader::new(py)?;
    run(py, &reader, &tensor_lists, kind, false, &Header::new(&options))
}

/// As `multi_tensor_adam`, with hyperparameters that are read on the device: `lr` and `inv_scale` fp32, `step` and `skip`
/// int32, one element each. Gradients are multiplied by `inv_scale` and written back; nothing is written if `skip` is 1.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the signature is Transformer Engine's")]
pub fn multi_tensor_adam_capturable<'py>(
    py: Python<'py>,
    tensor_lists: Vec<Vec<Entry<'py>>>,
    lr: &Bound<'py, PyAny>,
    beta1: f64,
    beta2: f64,
    eps: f64,
    step: &Bound<'py, PyAny>,
    mode: i64,
    bias_correction: i64,
    weight_decay: f64,
    inv_scale: &Bound<'py, PyAny>,
    skip: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let kind = if tensor_lists.len() == 4 { Master::None } else { Master::F32 };
    let (bias_correction, adam_w) = (bias_correction != 0, mode == 1);
    let options = Options { lr: 0.0, beta1, beta2, eps, weight_decay, bias_correction, adam_w, step: 0 };
    let reader = Reader::new(py)?;
    let device = match tensor_lists.first().and_then(|list| list.first()) {
        Some(entry) => reader.view(entry.tensor()?)?.device,
        None => return Ok(()),
    };
    let live = Live {
        lr: reader.one("lr", lr, Dtype::F32, device)?.address,
        step: reader.one("step", step, Dtype::I32, device)?.address,
        inv_scale: reader.one("inv_scale", inv_scale, Dtype::F32, device)?.address,
        skip: reader.one("skip", skip, Dtype::I32, device)?.address,
    };
    run(py, &reader, &tensor_lists, kind, true, &Header::live(&options, live))
}

fn run<'py>(
    py: Python<'py>,
    reader: &Reader<'py>,
    lists: &[Vec<Entry<'py>>],
    kind: Master,
    capturable: bool,
    header: &Header,
) -> PyResult<()> {
    let count = lists.first().map_or(0, Vec::len);
    let expected = if kind == Master::None { 4 } else { 5 };
    if lists.len() != expected || lists.iter().any(|list| list.len() != count) {
        let lengths: Vec<usize> = lists.iter().map(Vec::len).collect();
        return Err(PyRuntimeError::new_err(format!("expected {expected} lists of equal lengths, got {lengths:?}")));
    }
    let mut works: Vec<Option<Work>> = Vec::with_capacity(count);
    let mut device = Device::Cpu;
    for index in 0..count {
        let tensors = lists.iter().map(|list| list[index].tensor()).collect::<PyResult<Vec<_>>>()?;
        let views = tensors.iter().map(|tensor| reader.view(tensor)).collect::<PyResult<Vec<_>>>()?;
        let scaling = |list: usize| lists[list][index].scaling(reader, views[1].device);
        let column = Column {
            grad: views[0],
            param: views[1],
            exp_avg: views[2],
            exp_avg_sq: views[3],
            master: views.get(4).copied(),
            scaling: Some(Box::new([
                Scaling::default(),
                scaling(1)?,
                scaling(2)?,
                scaling(3)?,
                if kind == Master::None { Scaling::default() } else { scaling(4)? },
            ])),
            kind,
            moments: [views[2].dtype, views[3].dtype],
            capturable,
        };
        let place = Place { group: 0, index };
        match column.check().map_err(|fault| raise(fault, place, tensors[1], tensors[role(fault) as usize]))? {
            Verdict::Empty => works.push(None),
            Verdict::Ready(work) => {
                device = work.signature.device;
                works.push(Some(work));
            }
            Verdict::Unordered => {
                return Err(PyRuntimeError::new_err(format!("the tensors at {index} have different memory layouts")));
            }
        }
    }
    let mut plan = GroupPlan::default();
    plan.update(&works, parameter_bytes(device));
    for bucket in plan.buckets() {
        // SAFETY: the addresses were read in this call, from tensors that the lists hold.
        unsafe { Run::new(reader, py, bucket)?.launch(py, bucket, header) }?;
    }
    Ok(())
}

/// Updated (param, exp_avg, exp_avg_sq) of float32 arrays of equal length: the kernels' sequence of operations in IEEE
/// fp32 on the CPU, with exact reciprocals and square roots. ValueError for unequal lengths.
#[pyfunction]
#[pyo3(signature = (grad, param, exp_avg, exp_avg_sq, *, lr, betas, eps, weight_decay, step, bias_correction=true, adam_w=true))]
#[allow(clippy::too_many_arguments, clippy::type_complexity, reason = "the hyperparameters of Adam")]
pub fn adam_reference<'py>(
    py: Python<'py>,
    grad: PyReadonlyArray1<'py, f32>,
    param: PyReadonlyArray1<'py, f32>,
    exp_avg: PyReadonlyArray1<'py, f32>,
    exp_avg_sq: PyReadonlyArray1<'py, f32>,
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    step: i64,
    bias_correction: bool,
    adam_w: bool,
) -> PyResult<(Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<f32>>)> {
    let (beta1, beta2) = betas;
    let scalars = Scalars::new(&Options { lr, beta1, beta2, eps, weight_decay, bias_correction, adam_w, step });
    let g = grad.as_array().to_vec();
    let mut states = [param, exp_avg, exp_avg_sq].map(|array| array.as_array().to_vec());
    if states.iter().any(|state| state.len() != g.len()) {
        return Err(PyValueError::new_err("the arrays have different lengths"));
    }
    let [p, m, v] = &mut states;
    adam_update(&scalars, false, &g, p, m, v);
    let [p, m, v] = states.map(|state| state.into_pyarray(py));
    Ok((p, m, v))
}
