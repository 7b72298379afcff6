//! An optimizer's switches and a group's hyperparameters and counter, read anew every step.
//! Nothing here changes the optimizer but `advance`.

use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyString};

use crate::options::{Header, Live, Options};
use crate::plan::GroupPlan;
use crate::plan::column::Master;
use crate::python::reader::{Kind, Reader, Torch};
use crate::tensor::Dtype;

/// What the optimizer's constructor was told.
#[derive(Clone, PartialEq, Eq)]
pub struct Switches {
    pub master_weights: bool,
    pub master: Dtype,
    pub remainders: bool,
    pub decoupled_grad: bool,
    pub adam_w: bool,
    pub capturable: bool,
    /// Storage types of exp_avg and exp_avg_sq.
    pub moments: [Dtype; 2],
}

impl Switches {
    pub fn read(optimizer: &Bound<'_, PyAny>) -> PyResult<Switches> {
        let py = optimizer.py();
        let torch = Torch::get(py)?;
        let flag = |name: &Bound<'_, PyString>| optimizer.getattr(name)?.is_truthy();
        let dtypes = optimizer.getattr(intern!(py, "name_to_dtype_map"))?;
        let dtype = |name: &Bound<'_, PyString>| {
            // Transformer Engine's word for fp8 states is uint8.
            PyResult::Ok(match torch.dtype(&dtypes.get_item(name)?) {
                Dtype::U8 => Dtype::E4M3,
                dtype => dtype,
            })
        };
        Ok(Switches {
            master_weights: flag(intern!(py, "master_weights"))?,
            master: dtype(intern!(py, "master_param"))?,
            remainders: flag(intern!(py, "store_param_remainders"))?,
            decoupled_grad: flag(intern!(py, "use_decoupled_grad"))?,
            adam_w: optimizer.getattr(intern!(py, "adam_w_mode"))?.extract::<i64>()? == 1,
            capturable: flag(intern!(py, "capturable"))?,
            moments: [dtype(intern!(py, "exp_avg"))?, dtype(intern!(py, "exp_avg_sq"))?],
        })
    }

    /// Whether stock's kernels take the moments as they are stored.
    pub fn in_place(&self) -> bool {
        self.moments[0] == self.moments[1] && matches!(self.moments[0], Dtype::F32 | Dtype::BF16)
    }

    /// Whether any state is kept with a factor that scales it.
    pub fn scales_states(&self) -> bool {
        let scaled = |dtype| matches!(dtype, Dtype::F16 | Dtype::E4M3);
        self.moments.into_iter().chain([self.master]).any(scaled)
    }

    /// Whether initialising a parameter of this nominal dtype makes a remainder.
    pub fn remainder(&self, param: Dtype) -> bool {
        self.remainders && self.master_weights && param == Dtype::BF16
    }

    /// How the fp32 value of a parameter of this storage type is kept.
    pub fn master(&self, param: Dtype) -> Master {
        let half = self.master == Dtype::F16;
        match param {
            _ if !self.master_weights => Master::None,
            Dtype::F32 if half => Master::F16Idle,
            Dtype::F32 => Master::None,
            Dtype::BF16 if self.remainders => Master::Remainder,
            _ if half => Master::F16,
            _ => Master::F32,
        }
    }
}

/// A group's hyperparameters. In capturable mode lr and step are on the device and not read here.
pub fn read_options<'py>(group: &Bound<'py, PyDict>, switches: &Switches) -> PyResult<Options> {
    let py = group.py();
    let Switches { adam_w, capturable, .. } = *switches;
    let step = if capturable { 0 } else { next_step(group)? };
    let get = |name: &Bound<'py, PyString>| group.get_item(name)?.ok_or_else(|| PyKeyError::new_err(name.to_string()));
    let betas: Vec<f64> =
        get(intern!(py, "betas"))?.try_iter()?.map(|beta| beta?.extract()).collect::<PyResult<_>>()?;
    let [beta1, beta2] = betas[..] else {
        return Err(PyValueError::new_err(format!("betas must be two numbers, got {}", betas.len())));
    };
    Ok(Options {
        lr: if capturable { 0.0 } else { get(intern!(py, "lr"))?.extract()? },
        beta1,
        beta2,
        eps: get(intern!(py, "eps"))?.extract()?,
        weight_decay: get(intern!(py, "weight_decay"))?.extract()?,
        bias_correction: get(intern!(py, "bias_correction"))?.is_truthy()?,
        adam_w,
        step,
    })
}

/// (step, inv_scale, skip) of a group on its device.
pub type LiveTensors<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The header of a capturable step. A learning rate elsewhere is copied to the group's device and kept in `moved` until
/// the launch.
pub fn read_live<'py>(
    reader: &mut Reader<'py>,
    group: &Bound<'py, PyDict>,
    options: &Options,
    plan: &GroupPlan,
    live: &[LiveTensors<'py>],
    index: usize,
    moved: &mut Vec<Bound<'py, PyAny>>,
) -> PyResult<Header> {
    let py = group.py();
    let mut devices = plan.buckets().iter().map(|bucket| bucket.device);
    let Some(device) = devices.next() else { return Ok(Header::live(options, Live::default())) };
    if devices.any(|other| other != device) {
        return Err(PyRuntimeError::new_err(format!(
            "FusedAdam: group {index} has parameters on several devices, which capturable mode does not take; \
             give each device a group of its own"
        )));
    }
    let (step, inv_scale, skip) = &live[index];
    let mut lr = group.get_item(intern!(py, "lr"))?.ok_or_else(|| PyKeyError::new_err("lr"))?;
    if reader.kind(&lr)? != Kind::Plain {
        return Err(PyTypeError::new_err(format!(
            "FusedAdam: capturable mode takes the learning rate of group {index} as a tensor, got {lr}; \
             set it to torch.tensor(lr, dtype=torch.float32, device=...)"
        )));
    }
    if reader.view(&lr)?.device != device {
        let device = skip.getattr(intern!(py, "device"))?;
        lr = lr.call_method1(intern!(py, "to"), (device,))?;
        moved.push(lr.clone());
    }
    let live = Live {
        lr: reader.one("lr", &lr, Dtype::F32, device)?.address,
        step: reader.one("step", step, Dtype::I32, device)?.address,
        inv_scale: reader.one("inv_scale", inv_scale, Dtype::F32, device)?.address,
        skip: reader.one("skip", skip, Dtype::I32, device)?.address,
    };
    Ok(Header::live(options, live))
}

/// The group's counter as the coming step will have it.
fn next_step(group: &Bound<'_, PyDict>) -> PyResult<i64> {
    match group.get_item(intern!(group.py(), "step"))? {
        None => Ok(1),
        Some(step) => step
            .extract::<i64>()
            .map(|step| step + 1)
            .map_err(|_| PyTypeError::new_err(format!("a group's step must be an integer, got {step}"))),
    }
}

/// Advances the group's counter as `group["step"] += 1` does.
pub fn advance(group: &Bound<'_, PyDict>) -> PyResult<()> {
    let py = group.py();
    let key = intern!(py, "step");
    let next = match group.get_item(key)? {
        None => 1i64.into_pyobject(py)?.into_any(),
        Some(step) if step.is_exact_instance_of::<PyInt>() => {
            (step.extract::<i64>()? + 1).into_pyobject(py)?.into_any()
        }
        // A tensor or NumPy integer counts in place.
        Some(step) => py.import("operator")?.call_method1("iadd", (step, 1))?,
    };
    group.set_item(key, next)
}
