//! One step of one optimizer: read everything, check everything, then count and launch.
//! Invariant: until the first counter advances nothing of the optimizer has changed, and from there to the last launch
//! no Python code of the user's runs.

use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString};

use crate::options::{Header, Live, Options};
use crate::plan::GroupPlan;
use crate::plan::column::{Column, Master, Role, Verdict, Work};
use crate::python::device::{Readiness, VariantNames, launch, parameter_bytes, readiness, variant_names};
use crate::python::faults::{self, Place};
use crate::python::prefetch::{self, AHEAD, Trail};
use crate::python::reader::{Kind, Reader, StateWalk, Torch, state_entries};
use crate::tensor::{Device, Dtype, View};

/// What the optimizer's switches say, read anew every step.
struct Switches {
    master_weights: bool,
    remainders: bool,
    decoupled_grad: bool,
    adam_w: bool,
    capturable: bool,
    moment: Dtype,
    /// Why no kernel of ours serves these switches.
    unserved: Option<&'static str>,
}

impl Switches {
    fn read(optimizer: &Bound<'_, PyAny>) -> PyResult<Switches> {
        let py = optimizer.py();
        let torch = Torch::get(py)?;
        let flag = |name: &Bound<'_, PyString>| optimizer.getattr(name)?.is_truthy();
        let dtypes = optimizer.getattr(intern!(py, "name_to_dtype_map"))?;
        let dtype = |name: &Bound<'_, PyString>| PyResult::Ok(torch.dtype(&dtypes.get_item(name)?));
        let (exp_avg, exp_avg_sq) = (dtype(intern!(py, "exp_avg"))?, dtype(intern!(py, "exp_avg_sq"))?);
        let master_weights = flag(intern!(py, "master_weights"))?;
        let unserved = if exp_avg != exp_avg_sq || !matches!(exp_avg, Dtype::F32 | Dtype::BF16) {
            Some("moments that are not both float32 or both bfloat16")
        } else if master_weights && dtype(intern!(py, "master_param"))? != Dtype::F32 {
            Some("masters that are not float32")
        } else {
            None
        };
        Ok(Switches {
            master_weights,
            remainders: flag(intern!(py, "store_param_remainders"))?,
            decoupled_grad: flag(intern!(py, "use_decoupled_grad"))?,
            adam_w: optimizer.getattr(intern!(py, "adam_w_mode"))?.extract::<i64>()? == 1,
            capturable: flag(intern!(py, "capturable"))?,
            moment: exp_avg,
            unserved,
        })
    }

    fn master(&self, param: Dtype) -> Master {
        match param {
            Dtype::BF16 if self.master_weights && self.remainders => Master::Remainder,
            Dtype::BF16 | Dtype::F16 if self.master_weights => Master::F32,
            _ => Master::None,
        }
    }
}

/// A group's hyperparameters. In capturable mode lr and step are on the device and not read here.
fn read_options<'py>(group: &Bound<'py, PyDict>, switches: &Switches) -> PyResult<Options> {
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
type LiveTensors<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The header of a capturable step. A learning rate elsewhere is copied to the group's device and kept in `moved` until
/// the launch.
fn read_live<'py>(
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
        lr: reader.one("lr", &lr, Dtype::F32, device)?,
        step: reader.one("step", step, Dtype::I32, device)?,
        inv_scale: reader.one("inv_scale", inv_scale, Dtype::F32, device)?,
        skip: reader.one("skip", skip, Dtype::I32, device)?,
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
fn advance(group: &Bound<'_, PyDict>) -> PyResult<()> {
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

/// A contiguous copy that stands in for a tensor whose memory order is not its parameter's.
struct Staged<'py> {
    original: Bound<'py, PyAny>,
    copy: Bound<'py, PyAny>,
    written: bool,
}

/// What reading one group came to.
enum Outcome<'py> {
    /// One work per parameter.
    Works(Vec<Option<Work>>),
    /// These parameters have no state yet, with whether theirs is a remainder.
    Uninitialised(Vec<(Bound<'py, PyAny>, bool)>),
    /// Only stock can serve it.
    Unserved(&'static str),
}

/// A gradient and the tensor that holds its elements.
struct Grad<'py> {
    outer: Bound<'py, PyAny>,
    local: Bound<'py, PyAny>,
    sharded: bool,
}

struct GroupReader<'a, 'py> {
    reader: &'a mut Reader<'py>,
    walk: &'a mut StateWalk<'py>,
    staged: &'a mut Vec<Staged<'py>>,
    trails: &'a mut Vec<Trail>,
    switches: &'a Switches,
    strict_parity: bool,
    group: usize,
}

impl<'py> GroupReader<'_, 'py> {
    fn read(&mut self, params: &Bound<'py, PyAny>) -> PyResult<Outcome<'py>> {
        let params: Vec<Bound<'py, PyAny>> = match params.cast::<PyList>() {
            Ok(list) => list.iter().collect(),
            Err(_) => params.try_iter()?.collect::<PyResult<_>>()?,
        };
        if let Some(first) = params.first() {
            let (local, ..) = self.reader.local(first.clone())?;
            self.reader.find_record(&local);
        }
        let grads = self.open_grads(&params)?;
        let mut works = Vec::with_capacity(params.len());
        let mut uninitialised = Vec::new();
        let mut half = Dtype::Other;
        self.trails.resize_with(params.len(), Trail::default);
        self.trails.iter().take(AHEAD).for_each(Trail::prefetch);
        let locals: Vec<Option<u64>> = grads.iter().map(|grad| Some(grad.as_ref()?.local.as_ptr() as u64)).collect();
        for (index, (param, grad)) in params.into_iter().zip(grads).enumerate() {
            if let Some(trail) = self.trails.get(index + AHEAD) {
                trail.prefetch();
            }
            if let Some(at) = self.reader.record_at() {
                let ahead = |distance| locals.get(index + distance).copied().flatten();
                ahead(2 * AHEAD).inspect(|&object| at.fetch_record(object));
                ahead(AHEAD).inspect(|&object| at.fetch_behind(object));
            }
            let place = Place { group: self.group, index };
            let (local, outer, inner) = self.reader.local(param.clone())?;
            if inner == Kind::Wrapped {
                return Ok(Outcome::Unserved("a quantized parameter"));
            }
            let view = self.view(&local, place, &param, Role::Param)?;
            let at = self.reader.record_at();
            self.trails[index].note(0, param.as_ptr() as u64, local.as_ptr() as u64, view.record, at);
            let kind = self.switches.master(view.dtype);
            let grad = self.checked_grad(place, &param, outer, grad)?;
            if grad.is_some() && matches!(view.dtype, Dtype::F16 | Dtype::BF16) {
                if half != Dtype::Other && half != view.dtype {
                    return Err(faults::mixed(place, &param, view.dtype, self.switches.remainders));
                }
                half = view.dtype;
            }
            let state = match self.walk.get(&param)? {
                Some(state) => state.cast_into::<PyDict>().map_err(PyErr::from)?,
                None => PyDict::new(param.py()),
            };
            self.trails[index].note_state(state.as_ptr() as u64);
            if state.is_empty() {
                if let Some(grad) = &grad {
                    // A gradient that will be refused must be refused before any state is made.
                    self.check_grad(place, &param, view, grad)?;
                }
                uninitialised.push((param, kind == Master::Remainder));
                continue;
            }
            let Some(grad) = grad else {
                works.push(None);
                continue;
            };
            match self.read_column(place, &param, outer, (local, view), grad, &state, kind)? {
                Some(work) => works.push(work),
                None => return Ok(Outcome::Unserved("states of a DTensor that lost their sharding")),
            }
        }
        Ok(if uninitialised.is_empty() { Outcome::Works(works) } else { Outcome::Uninitialised(uninitialised) })
    }

    fn view(&self, tensor: &Bound<'py, PyAny>, place: Place, param: &Bound<'py, PyAny>, role: Role) -> PyResult<View> {
        self.reader.view(tensor).map_err(|error| faults::unreadable(error, place, param, role))
    }

    /// Every parameter's gradient, opened in passes so that the memory of one pass arrives while the one before runs.
    fn open_grads(&mut self, params: &[Bound<'py, PyAny>]) -> PyResult<Vec<Option<Grad<'py>>>> {
        let mut outers = Vec::with_capacity(params.len());
        for (index, param) in params.iter().enumerate() {
            if let Some(ahead) = params.get(index + 3 * AHEAD) {
                prefetch::object(ahead.as_ptr() as u64);
            }
            if let Some(at) = self.reader.record_at() {
                let ahead = |distance: usize| params.get(index + distance).map(|param| param.as_ptr() as u64);
                ahead(2 * AHEAD).inspect(|&object| at.fetch_record(object));
                ahead(AHEAD).inspect(|&object| at.fetch_behind(object));
            }
            let grad = self.reader.grad(param, self.switches.decoupled_grad)?;
            if let Some(grad) = &grad {
                prefetch::object(grad.as_ptr() as u64);
            }
            outers.push(grad);
        }
        let mut grads = Vec::with_capacity(params.len());
        for (index, outer) in outers.into_iter().enumerate() {
            let Some(outer) = outer else {
                grads.push(None);
                continue;
            };
            let (local, kind, inner) = self.reader.local(outer.clone())?;
            if inner == Kind::Wrapped {
                let place = Place { group: self.group, index };
                let error = PyTypeError::new_err(format!("a {} is no plain tensor", local.get_type()));
                return Err(faults::unreadable(error, place, &params[index], Role::Grad));
            }
            prefetch::object(local.as_ptr() as u64);
            grads.push(Some(Grad { outer, local, sharded: kind == Kind::Sharded }));
        }
        Ok(grads)
    }

    /// The local gradient, if it is as sharded as its parameter or the release does not mind.
    fn checked_grad(
        &self,
        place: Place,
        param: &Bound<'py, PyAny>,
        outer: Kind,
        grad: Option<Grad<'py>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(Grad { outer: grad, local, sharded }) = grad else { return Ok(None) };
        if self.strict_parity && sharded != (outer == Kind::Sharded) {
            return Err(faults::parity(place, param, Role::Grad, &grad));
        }
        Ok(Some(local))
    }

    /// The gradient's view; sparse ones have none.
    fn grad_view(&self, place: Place, param: &Bound<'py, PyAny>, grad: &Bound<'py, PyAny>) -> PyResult<View> {
        self.reader.view(grad).map_err(|error| {
            let dense = grad
                .getattr("layout")
                .and_then(|layout| Ok(layout.is(&grad.py().import("torch")?.getattr("strided")?)))
                .unwrap_or(true);
            if dense { faults::unreadable(error, place, param, Role::Grad) } else { faults::sparse(place, param, grad) }
        })
    }

    fn check_grad(
        &self,
        place: Place,
        param: &Bound<'py, PyAny>,
        view: View,
        grad: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let state = View { dtype: Dtype::F32, ..view };
        let column = Column {
            grad: self.grad_view(place, param, grad)?,
            param: view,
            exp_avg: state,
            exp_avg_sq: state,
            master: None,
            kind: Master::None,
            moment: Dtype::F32,
            capturable: false,
        };
        column.check().map_err(|fault| faults::raise(fault, place, param, grad)).map(|_| ())
    }

    /// The checked work of a parameter with gradient and state; `None` inside: no elements; `None` outside: unserved.
    #[allow(clippy::too_many_arguments, reason = "what was read so far")]
    fn read_column(
        &mut self,
        place: Place,
        param: &Bound<'py, PyAny>,
        outer: Kind,
        (local, view): (Bound<'py, PyAny>, View),
        grad: Bound<'py, PyAny>,
        state: &Bound<'py, PyDict>,
        kind: Master,
    ) -> PyResult<Option<Option<Work>>> {
        let py = param.py();
        let grad_view = self.grad_view(place, param, &grad)?;
        let mut states: [Option<(Bound<'py, PyAny>, View)>; 3] = [None, None, None];
        let names = [intern!(py, "exp_avg"), intern!(py, "exp_avg_sq"), intern!(py, "master_param")];
        let roles = [Role::ExpAvg, Role::ExpAvgSq, Role::Master];
        let entries = state_entries(state, names)?;
        for ((slot, entry), role) in states.iter_mut().zip(entries).zip(roles) {
            if role == Role::Master && kind == Master::None {
                continue;
            }
            let tensor = entry.ok_or_else(|| {
                let missing = role.name();
                PyKeyError::new_err(format!("{missing}: the state of {} lacks it", faults::name(place, param)))
            })?;
            let outer_address = tensor.as_ptr() as u64;
            let (tensor, outer_state, inner) = self.reader.local(tensor)?;
            if (outer_state == Kind::Sharded) != (outer == Kind::Sharded) {
                if self.strict_parity {
                    return Err(faults::parity(place, param, role, &tensor));
                }
                return Ok(None);
            }
            if inner == Kind::Wrapped {
                let error = PyTypeError::new_err("it is no plain tensor");
                return Err(faults::unreadable(error, place, param, role));
            }
            let seen = self.view(&tensor, place, param, role)?;
            let at = role as usize - Role::Param as usize;
            let record_at = self.reader.record_at();
            self.trails[place.index].note(at, outer_address, tensor.as_ptr() as u64, seen.record, record_at);
            *slot = Some((tensor, seen));
        }
        let [Some((exp_avg, exp_avg_view)), Some((exp_avg_sq, exp_avg_sq_view)), master] = states else {
            return Err(PyRuntimeError::new_err("the moments were not read"));
        };
        let column = Column {
            grad: grad_view,
            param: view,
            exp_avg: exp_avg_view,
            exp_avg_sq: exp_avg_sq_view,
            master: master.as_ref().map(|(_, view)| *view),
            kind,
            moment: self.switches.moment,
            capturable: self.switches.capturable,
        };
        let tensors = [Some(grad), Some(local), Some(exp_avg), Some(exp_avg_sq), master.map(|(tensor, _)| tensor)];
        let verdict = column.check().map_err(|fault| {
            let tensor = tensors[faults::role(fault) as usize].as_ref().unwrap_or(param);
            faults::raise(fault, place, param, tensor)
        })?;
        match verdict {
            Verdict::Empty => Ok(Some(None)),
            Verdict::Ready(work) => Ok(Some(Some(work))),
            Verdict::Unordered => self.stage(place, param, column, tensors).map(|work| Some(Some(work))),
        }
    }

    /// Puts contiguous copies in the place of tensors that are not contiguous.
    fn stage(
        &mut self,
        place: Place,
        param: &Bound<'py, PyAny>,
        column: Column,
        tensors: [Option<Bound<'py, PyAny>>; 5],
    ) -> PyResult<Work> {
        let mut views = [None; 5];
        for ((slot, tensor), role) in views.iter_mut().zip(tensors).zip(Role::ALL) {
            let Some(original) = tensor else { continue };
            let copy = original.call_method0("detach")?.call_method0("contiguous")?;
            let view = self.view(&copy, place, param, role)?;
            *slot = Some(view);
            if view.address != self.view(&original, place, param, role)?.address {
                let written = role != Role::Grad || self.switches.capturable;
                self.staged.push(Staged { original, copy, written });
            }
        }
        let [Some(grad), Some(param_view), Some(exp_avg), Some(exp_avg_sq), master] = views else {
            return Err(PyRuntimeError::new_err("a tensor went missing while it was copied"));
        };
        let shape = |view: View| View { shape: param_view.shape, ..view };
        let column = Column {
            grad,
            param: param_view,
            exp_avg: shape(exp_avg),
            exp_avg_sq: shape(exp_avg_sq),
            master: master.map(shape),
            ..column
        };
        match column.check() {
            Ok(Verdict::Ready(work)) => Ok(work),
            _ => Err(PyRuntimeError::new_err(format!(
                "FusedAdam: {} and its states cannot be brought into one memory order",
                faults::name(place, param)
            ))),
        }
    }
}

/// What one group's last step was.
#[derive(Default)]
struct GroupRecord {
    plan: GroupPlan,
    trails: Vec<Trail>,
    tier: &'static str,
    reason: String,
    steps: u64,
    launches: u64,
}

/// The plan of one optimizer's groups. Holds numbers only: no tensor, gradient or parameter is kept alive by it.
#[pyclass(module = "te_patches._core")]
#[derive(Default)]
pub struct Plan {
    groups: Vec<GroupRecord>,
}

/// What Python has to do before the step can go on; the optimizer is as it was.
#[derive(IntoPyObject)]
pub enum Todo<'py> {
    /// ("initialize", [(parameter, whether its master is a remainder)])
    Initialize((&'static str, Vec<(Bound<'py, PyAny>, bool)>)),
    /// ("prove", [(device, kernel's names)])
    Prove((&'static str, Vec<(u16, VariantNames)>)),
    /// ("lower", [(group, tier)]): serve these groups in a lower tier, then name them in `served`.
    Lower((&'static str, Vec<(usize, &'static str)>)),
}

#[pymethods]
impl Plan {
    #[new]
    fn new() -> Plan {
        Plan::default()
    }

    /// Takes one step, or returns what has to be done first. `mode`: "auto", "native" or "te". `served`: groups already
    /// stepped in a lower tier. `strict_parity`: the release refuses DTensors beside plain tensors.
    /// `count_empty`: the release advances the counter of a group without parameters. `live`: in capturable mode the
    /// (step, inv_scale, skip) of each group, one-element tensors; counters are then the caller's to advance.
    fn step<'py>(
        &mut self,
        optimizer: &Bound<'py, PyAny>,
        mode: &str,
        served: Vec<usize>,
        strict_parity: bool,
        count_empty: bool,
        live: Option<Vec<LiveTensors<'py>>>,
    ) -> PyResult<Option<Todo<'py>>> {
        let py = optimizer.py();
        let switches = Switches::read(optimizer)?;
        let groups: Vec<Bound<'py, PyAny>> =
            optimizer.getattr(intern!(py, "param_groups"))?.try_iter()?.collect::<PyResult<_>>()?;
        let state = optimizer.getattr(intern!(py, "state"))?.cast_into::<PyDict>()?;
        let (mut reader, mut walk, mut staged) = (Reader::new(py)?, StateWalk::new(state), Vec::new());
        self.groups.truncate(groups.len());
        self.groups.resize_with(groups.len(), GroupRecord::default);

        // Stock orders counters and flags of capturable groups among themselves; lists alone would not.
        let below = if switches.capturable { "stock" } else { "replay" };
        let mut ready: Vec<(usize, Bound<'py, PyDict>, Header)> = Vec::with_capacity(groups.len());
        let (mut uncounted, mut moved) = (Vec::new(), Vec::new());
        let (mut uninitialised, mut unproven, mut lower) = (Vec::new(), Vec::new(), Vec::new());
        for (index, group) in groups.iter().enumerate() {
            if served.contains(&index) {
                continue;
            }
            let group = group.cast::<PyDict>()?;
            let params = group.get_item(intern!(py, "params"))?.ok_or_else(|| PyKeyError::new_err("params"))?;
            let record = &mut self.groups[index];
            if let Some(reason) = switches.unserved {
                (record.tier, record.reason) = ("stock", reason.to_owned());
                lower.push((index, "stock"));
                continue;
            }
            if params.len()? == 0 {
                (record.tier, record.reason) = ("native", "no parameters".to_owned());
                record.plan.update(&[], 0);
                if count_empty {
                    uncounted.push(group.clone());
                }
                continue;
            }
            let options = read_options(group, &switches)?;
            let mut group_reader = GroupReader {
                reader: &mut reader,
                walk: &mut walk,
                staged: &mut staged,
                trails: &mut record.trails,
                switches: &switches,
                strict_parity,
                group: index,
            };
            match group_reader.read(&params)? {
                Outcome::Uninitialised(params) => uninitialised.extend(params),
                Outcome::Unserved(reason) => {
                    (record.tier, record.reason) = ("stock", reason.to_owned());
                    lower.push((index, "stock"));
                }
                Outcome::Works(works) => {
                    let device = works.iter().flatten().next().map_or(Device::Cpu, |work| work.signature.device);
                    record.plan.update(&works, parameter_bytes(device));
                    (record.tier, record.reason) = ("native", String::new());
                    if mode == "te" {
                        (record.tier, record.reason) = (below, "kernels=\"te\"".to_owned());
                        lower.push((index, below));
                        continue;
                    }
                    match readiness(&record.plan) {
                        Readiness::Ready => {
                            let header = match &live {
                                None => Header::new(&options),
                                Some(live) => {
                                    read_live(&mut reader, group, &options, &record.plan, live, index, &mut moved)?
                                }
                            };
                            ready.push((index, group.clone(), header));
                        }
                        Readiness::Unproven(variants) => unproven.extend(variants),
                        Readiness::Unusable(reason) if mode == "native" => {
                            return Err(PyRuntimeError::new_err(format!(
                                "te_patches: kernels=\"native\", but group {index} cannot be served natively: {reason}"
                            )));
                        }
                        Readiness::Unusable(reason) => {
                            (record.tier, record.reason) = (below, reason);
                            lower.push((index, below));
                        }
                    }
                }
            }
        }
        if !uninitialised.is_empty() {
            return Ok(Some(Todo::Initialize(("initialize", uninitialised))));
        }
        if !unproven.is_empty() {
            unproven.sort_by_key(|&(device, variant)| (device, variant.name()));
            unproven.dedup();
            let unproven = unproven.into_iter().map(|(device, variant)| (device, variant_names(variant))).collect();
            return Ok(Some(Todo::Prove(("prove", unproven))));
        }
        if !lower.is_empty() {
            return Ok(Some(Todo::Lower(("lower", lower))));
        }

        if live.is_none() {
            for group in uncounted.iter().chain(ready.iter().map(|(_, group, _)| group)) {
                advance(group)?;
            }
        }
        for (index, _, header) in &ready {
            let record = &mut self.groups[*index];
            for bucket in record.plan.buckets() {
                // SAFETY: the addresses were read in this call; since then only counters were written.
                record.launches += unsafe { launch(py, bucket, header) }?;
            }
            record.steps += 1;
        }
        for staged in staged.into_iter().filter(|staged| staged.written) {
            staged.original.call_method0("detach")?.call_method1("copy_", (staged.copy,))?;
        }
        Ok(None)
    }

    /// Per group: index, tier, reason, kernels, tensors, elements, steps taken natively, launches, plans made.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let row = |(index, record): (usize, &GroupRecord)| {
            let row = PyDict::new(py);
            let (tensors, elements) = record.plan.size();
            let kernels: Vec<String> =
                record.plan.buckets().iter().map(|b| format!("{} ({})", b.variant.name(), b.device)).collect();
            row.set_item("index", index)?;
            row.set_item("tier", record.tier)?;
            row.set_item("reason", &record.reason)?;
            row.set_item("kernels", if record.tier == "native" { kernels } else { Vec::new() })?;
            row.set_item("tensors", tensors)?;
            row.set_item("elements", elements)?;
            row.set_item("steps", record.steps)?;
            row.set_item("launches", record.launches)?;
            row.set_item("plans", record.plan.built())?;
            Ok(row)
        };
        self.groups.iter().enumerate().map(row).collect()
    }
}
