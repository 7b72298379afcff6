//! Reads one parameter group: every gradient, parameter and state, checked, as works for the plan.
//! Nothing of the optimizer is changed here; copies that a step needs are made aside.

use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::plan::column::{Column, Master, Role, Verdict, Work};
use crate::plan::operands::Scaling;
use crate::python::again::Buffers;
use crate::python::faults::{self, Place};
use crate::python::options::Switches;
use crate::python::prefetch::{AHEAD, Checked, Trails};
use crate::python::quantized::Fp8;
use crate::python::reader::{Kind, Reader, StateWalk, state_entries, state_keys};
use crate::python::recall::Kinds;
use crate::tensor::{Device, Dtype, View};

/// What a step does once its kernels are launched.
#[derive(Default)]
pub struct Aftermath<'py> {
    /// (tensor, contiguous copy that stood in for it) where the memory order was not the parameter's.
    copies: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    /// Copies that stood in for tensors that are only read.
    held: Vec<Bound<'py, PyAny>>,
    /// (quantized parameter, fp32 value that it is made of).
    quantized: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    /// fp8 states with a transposed copy of their data, which is out of date then.
    transposed: Vec<Bound<'py, PyAny>>,
}

impl Aftermath<'_> {
    /// How many parameters are quantized anew.
    pub fn quantized(&self) -> usize {
        self.quantized.len()
    }

    /// Does it.
    pub fn finish(self, py: Python<'_>) -> PyResult<()> {
        if self.copies.is_empty() && self.quantized.is_empty() && self.transposed.is_empty() {
            return Ok(());
        }
        let no_grad = py.import("torch")?.call_method0("no_grad")?;
        no_grad.call_method0("__enter__")?;
        let done = self.finish_without_grad(py);
        no_grad.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        done
    }

    fn finish_without_grad(self, py: Python<'_>) -> PyResult<()> {
        for (original, copy) in self.copies {
            original.call_method0("detach")?.call_method1("copy_", (copy,))?;
        }
        for (param, value) in self.quantized {
            param.call_method1(intern!(py, "quantize_"), (value,))?;
        }
        for state in self.transposed {
            // Nobody reads the transpose of a state; whoever did would have it made anew.
            state.setattr(intern!(py, "_transpose_invalid"), true)?;
        }
        Ok(())
    }
}

/// What the installed Transformer Engine does; see `te_patches._releases.Release`.
#[derive(FromPyObject)]
pub struct Release {
    pub counts_empty_groups: bool,
    pub strict_parity: bool,
    quantizes_from_master: bool,
    delayed_scaling_apart: bool,
}

/// What reading one group came to.
pub enum Outcome<'py> {
    /// One work per parameter, in the buffers.
    Works,
    /// These parameters have no state yet, with whether theirs is a remainder.
    Uninitialised(Vec<(Bound<'py, PyAny>, bool)>),
    /// Only stock can serve it.
    Unserved(&'static str),
}

/// A parameter with its gradient and dicts.
struct Opened<'py> {
    index: usize,
    param: Bound<'py, PyAny>,
    grad: Option<Grad<'py>>,
    /// `optimizer.state[param]`.
    state: Option<Bound<'py, PyDict>>,
    /// `optimizer._scales[param]`, where the options call for scaled states.
    scales: Option<Bound<'py, PyDict>>,
}

/// A gradient and the tensor that holds its elements.
struct Grad<'py> {
    outer: Bound<'py, PyAny>,
    local: Bound<'py, PyAny>,
    sharded: bool,
}

/// The value that an update writes, as the kernels see it.
struct Value<'py> {
    tensor: Bound<'py, PyAny>,
    view: View,
    scaling: Option<Scaling>,
    /// The quantized parameter that is made of it afterwards.
    quantized: Option<Bound<'py, PyAny>>,
}

/// A state as the kernels see it.
struct State<'py> {
    tensor: Bound<'py, PyAny>,
    view: View,
    scaling: Option<Scaling>,
}

/// Reads the parameters of one group.
pub struct GroupReader<'a, 'py> {
    pub reader: &'a mut Reader<'py>,
    pub walk: &'a mut StateWalk<'py>,
    /// A walk through `optimizer._scales`.
    pub scales: &'a mut StateWalk<'py>,
    pub aftermath: &'a mut Aftermath<'py>,
    pub trails: &'a mut Trails,
    pub kinds: &'a mut Kinds,
    pub buffers: &'a mut Buffers,
    pub switches: &'a Switches,
    pub release: &'a Release,
    pub group: usize,
}

impl<'py> GroupReader<'_, 'py> {
    /// Reads and checks all of them.
    pub fn read(&mut self, params: &Bound<'py, PyAny>) -> PyResult<Outcome<'py>> {
        let params = match params.cast::<PyList>() {
            Ok(list) => list.clone(),
            Err(_) => PyList::new(params.py(), params.try_iter()?.collect::<PyResult<Vec<_>>>()?)?,
        };
        self.trails.begin();
        self.buffers.begin(params.len());
        self.read_again(&params)?;
        let left = (0..self.buffers.done.len()).filter(|&at| !self.buffers.done[at]);
        let left = left.map(|at| Ok((at, params.get_item(at)?))).collect::<PyResult<_>>()?;
        let unchanged = self.trails.keep_all_if(&self.buffers.done);
        let mut left = self.open(left)?.into_iter();
        let mut uninitialised = Vec::new();
        let mut half = Dtype::Other;
        for index in 0..self.buffers.done.len() {
            let place = Place { group: self.group, index };
            if !unchanged {
                self.trails.begin_parameter();
            }
            if self.buffers.done[index] {
                if let Some(work) = &self.buffers.works[index] {
                    let param = || params.get_item(index);
                    self.check_half(&mut half, work.signature.variant.param, place, param)?;
                }
                if !unchanged {
                    self.trails.keep();
                }
                continue;
            }
            if let Some(ahead) = left.as_slice().get(AHEAD) {
                self.trails.prefetch_tensors(ahead.index);
            }
            let opened = left.next().ok_or_else(|| PyRuntimeError::new_err("a parameter went missing"))?;
            let param = &opened.param;
            let (local, outer, inner) = self.reader.local(param.clone())?;
            let value = if inner == Kind::Wrapped {
                match self.quantized_value(place, param, local)? {
                    Some(value) => value,
                    None => return Ok(Outcome::Unserved("a quantized parameter that this release does not know")),
                }
            } else {
                let view = self.noted_view(param.as_ptr() as u64, &local, place, param, Role::Param)?;
                Value { tensor: local, view, scaling: None, quantized: None }
            };
            self.check_parity(place, &opened, outer)?;
            let dtype = value.view.dtype;
            if opened.grad.is_some() {
                self.check_half(&mut half, dtype, place, || Ok(param.clone()))?;
            }
            let Some(state) = opened.state.as_ref().filter(|state| !state.is_empty()) else {
                if let Some(grad) = &opened.grad {
                    // A gradient that will be refused must be refused before any state is made.
                    self.check_grad(place, param, value.view, &grad.local)?;
                }
                uninitialised.push((opened.param, self.switches.remainder(dtype)));
                continue;
            };
            self.trails.note_dict(0, state.as_ptr() as u64);
            if let Some(scales) = &opened.scales {
                self.trails.note_dict(0, scales.as_ptr() as u64);
            }
            let Some(grad) = &opened.grad else { continue };
            match self.read_column(place, &opened, outer, value, grad, state)? {
                Some(work) => self.buffers.works[index] = work,
                None => return Ok(Outcome::Unserved("states of a DTensor that lost their sharding")),
            }
        }
        Ok(if uninitialised.is_empty() { Outcome::Works } else { Outcome::Uninitialised(uninitialised) })
    }

    /// Refuses fp16 beside bf16: `half` is the one met before.
    fn check_half(
        &self,
        half: &mut Dtype,
        dtype: Dtype,
        place: Place,
        param: impl Fn() -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        if matches!(dtype, Dtype::F16 | Dtype::BF16) {
            if *half != Dtype::Other && *half != dtype {
                return Err(faults::mixed(place, &param()?, dtype, self.switches.remainders));
            }
            *half = dtype;
        }
        Ok(())
    }

    fn view(&self, tensor: &Bound<'py, PyAny>, place: Place, param: &Bound<'py, PyAny>, role: Role) -> PyResult<View> {
        self.reader.view(tensor).map_err(|error| faults::unreadable(error, place, param, role))
    }

    /// As `view`, noted for the next step.
    fn noted_view(
        &mut self,
        outer: u64,
        tensor: &Bound<'py, PyAny>,
        place: Place,
        param: &Bound<'py, PyAny>,
        role: Role,
    ) -> PyResult<View> {
        let (view, kind) = self
            .reader
            .view_alike(tensor, self.kinds, self.trails.kind())
            .map_err(|error| faults::unreadable(error, place, param, role))?;
        self.trails.note(outer, tensor.as_ptr() as u64, view.record, self.reader.record_at(), kind);
        Ok(view)
    }

    /// The data of an fp8 parameter that the kernels write themselves, or the shape of what another one is made of.
    fn quantized_value(
        &mut self,
        place: Place,
        param: &Bound<'py, PyAny>,
        local: Bound<'py, PyAny>,
    ) -> PyResult<Option<Value<'py>>> {
        let class = || local.get_type().name().map_or_else(|_| "quantized".to_owned(), |name| name.to_string());
        let fp8 = self.reader.fp8(&local).map_err(|error| faults::unreadable(error, place, param, Role::Param))?;
        let own = fp8.as_ref().is_some_and(|fp8| fp8.delayed || !self.release.delayed_scaling_apart);
        let known = own || self.release.quantizes_from_master && self.reader.is_quantized(&local)?;
        if !known {
            return Ok(None);
        }
        if self.switches.capturable {
            return Err(faults::capturable_quantized(place, param, &class()));
        }
        if !self.switches.master_weights {
            return Err(faults::no_master(place, param, &class()));
        }
        if self.switches.remainders {
            return Err(faults::quantized_remainder(place, param, &class()));
        }
        let Some(Fp8 { data, dtype, scale, scale_inv, amax, dicts, .. }) = fp8.filter(|_| own) else {
            let view = View { dtype: Dtype::F32, ..self.reader.wrapper_view(&local)? };
            return Ok(Some(Value { tensor: local.clone(), view, scaling: None, quantized: Some(local) }));
        };
        dicts.into_iter().flatten().for_each(|[owner, dict]| self.trails.note_dict(owner, dict));
        let view = View { dtype, ..self.noted_view(param.as_ptr() as u64, &data, place, param, Role::Param)? };
        let mut one = |name, tensor| self.number(name, tensor, view.device);
        let scaling = Scaling {
            factor: 0,
            scale: one("an fp8 scale", &scale)?,
            scale_inv: one("an fp8 scale_inv", &scale_inv)?,
            amax: one("an fp8 amax", &amax)?,
        };
        Ok(Some(Value { tensor: data, view, scaling: Some(scaling), quantized: None }))
    }

    /// Parameters with their gradients and dicts, opened in passes so that the memory of one pass arrives while the one
    /// before runs.
    fn open(&mut self, params: Vec<(usize, Bound<'py, PyAny>)>) -> PyResult<Vec<Opened<'py>>> {
        let decoupled = self.switches.decoupled_grad;
        let outers: Vec<Option<Bound<'py, PyAny>>> =
            params.iter().map(|(_, param)| self.reader.grad(param, decoupled)).collect::<PyResult<_>>()?;
        let scaled = self.switches.scales_states();
        let mut opened = Vec::with_capacity(params.len());
        for ((index, param), outer) in params.into_iter().zip(outers) {
            self.trails.prefetch_dicts(index + 2 * AHEAD);
            let grad = outer.map(|outer| self.open_grad(index, &param, outer)).transpose()?;
            let dict = |entry: Option<Bound<'py, PyAny>>| entry.map(|dict| dict.cast_into::<PyDict>()).transpose();
            let state = dict(self.walk.get(&param)?)?;
            let scales = if scaled { dict(self.scales.get(&param)?)? } else { None };
            opened.push(Opened { index, param, grad, state, scales });
        }
        Ok(opened)
    }

    fn open_grad(&mut self, index: usize, param: &Bound<'py, PyAny>, outer: Bound<'py, PyAny>) -> PyResult<Grad<'py>> {
        let (local, kind, inner) = self.reader.local(outer.clone())?;
        if inner == Kind::Wrapped {
            let place = Place { group: self.group, index };
            let error = PyTypeError::new_err(format!("a {} is no plain tensor", local.get_type()));
            return Err(faults::unreadable(error, place, param, Role::Grad));
        }
        Ok(Grad { outer, local, sharded: kind == Kind::Sharded })
    }

    /// Refuses a gradient that is not as sharded as its parameter where the release minds.
    fn check_parity(&self, place: Place, opened: &Opened<'py>, outer: Kind) -> PyResult<()> {
        match &opened.grad {
            Some(grad) if self.release.strict_parity && grad.sharded != (outer == Kind::Sharded) => {
                Err(faults::parity(place, &opened.param, Role::Grad, &grad.outer))
            }
            _ => Ok(()),
        }
    }

    /// The gradient's view; sparse ones have none.
    fn grad_view(&mut self, place: Place, param: &Bound<'py, PyAny>, grad: &Bound<'py, PyAny>) -> PyResult<View> {
        let known = self.trails.grad_kind(place.index);
        let read = self.reader.view_alike(grad, self.kinds, known);
        read.map(|(view, kind)| {
            self.trails.note_grad(kind);
            view
        })
        .map_err(|error| {
            let dense = grad
                .getattr("layout")
                .and_then(|layout| Ok(layout.is(&grad.py().import("torch")?.getattr("strided")?)))
                .unwrap_or(true);
            if dense { faults::unreadable(error, place, param, Role::Grad) } else { faults::sparse(place, param, grad) }
        })
    }

    fn check_grad(
        &mut self,
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
            scaling: None,
            kind: Master::None,
            moments: [Dtype::F32; 2],
            capturable: false,
        };
        column.check().map_err(|fault| faults::raise(fault, place, param, grad)).map(|_| ())
    }

    /// The checked work of a parameter with gradient and state; `None` inside: no elements; `None` outside: unserved.
    fn read_column(
        &mut self,
        place: Place,
        opened: &Opened<'py>,
        outer: Kind,
        mut value: Value<'py>,
        grad: &Grad<'py>,
        state: &Bound<'py, PyDict>,
    ) -> PyResult<Option<Option<Work>>> {
        let param = &opened.param;
        let remade = value.quantized.is_some();
        let grad_view = self.grad_view(place, param, &grad.local)?;
        let mut kind = self.switches.master(value.view.dtype);
        if value.quantized.is_some() {
            kind = if self.switches.master == Dtype::F16 { Master::F16 } else { Master::F32 };
        }
        let mut states: [Option<State<'py>>; 3] = [None, None, None];
        let roles = [Role::ExpAvg, Role::ExpAvgSq, Role::Master];
        let [exp_avg, exp_avg_sq] = self.switches.moments;
        let master = if matches!(kind, Master::F16 | Master::F16Idle) { Dtype::F16 } else { Dtype::Other };
        let dtypes = [exp_avg, exp_avg_sq, master];
        let entries = state_entries(state);
        if kind == Master::F16Idle && entries[2].is_none() {
            kind = Master::None;
        }
        for (at, entry) in entries.into_iter().enumerate() {
            if roles[at] == Role::Master && kind == Master::None {
                continue;
            }
            let tensor = entry.ok_or_else(|| {
                let missing = roles[at].name();
                PyKeyError::new_err(format!("{missing}: the state of {} lacks it", faults::name(place, param)))
            })?;
            let outer_address = tensor.as_ptr() as u64;
            let (tensor, outer_state, _) = self.reader.local(tensor)?;
            if (outer_state == Kind::Sharded) != (outer == Kind::Sharded) {
                if self.release.strict_parity {
                    return Err(faults::parity(place, param, roles[at], &tensor));
                }
                return Ok(None);
            }
            states[at] = Some(self.read_state(place, opened, roles[at], dtypes[at], outer_address, tensor)?);
        }
        let [Some(exp_avg), Some(exp_avg_sq), mut master] = states else {
            return Err(PyRuntimeError::new_err("the moments were not read"));
        };
        if let Some(quantized) = value.quantized.take() {
            (value, master) = self.value_of(place, param, quantized, master)?;
            kind = if master.is_some() { kind } else { Master::None };
        }
        let of_master = master.as_ref().and_then(|master| master.scaling);
        let parts = [None, value.scaling, exp_avg.scaling, exp_avg_sq.scaling, of_master];
        let scaled = parts.iter().any(Option::is_some);
        let column = Column {
            grad: grad_view,
            param: value.view,
            exp_avg: exp_avg.view,
            exp_avg_sq: exp_avg_sq.view,
            master: master.as_ref().map(|master| master.view),
            scaling: scaled.then(|| Box::new(parts.map(Option::unwrap_or_default))),
            kind,
            moments: self.switches.moments,
            capturable: self.switches.capturable,
        };
        let master = master.map(|master| master.tensor);
        let tensors =
            [Some(grad.local.clone()), Some(value.tensor), Some(exp_avg.tensor), Some(exp_avg_sq.tensor), master];
        let verdict = column.check().map_err(|fault| {
            let tensor = tensors[faults::role(fault) as usize].as_ref().unwrap_or(param);
            faults::raise(fault, place, param, tensor)
        })?;
        // What is quantized anew is read in full each time.
        if !remade && !matches!(verdict, Verdict::Unordered) {
            let sharded = outer == Kind::Sharded;
            self.trails.note_checked(Checked { signature: column.signature(), sharded, grad_sharded: grad.sharded });
        }
        match verdict {
            Verdict::Empty => Ok(Some(None)),
            Verdict::Ready(work) => Ok(Some(Some(work))),
            Verdict::Unordered => self.stage(place, param, column, tensors).map(|work| Some(Some(work))),
        }
    }

    /// A state and where its scaling is kept.
    fn read_state(
        &mut self,
        place: Place,
        opened: &Opened<'py>,
        role: Role,
        dtype: Dtype,
        outer: u64,
        tensor: Bound<'py, PyAny>,
    ) -> PyResult<State<'py>> {
        let param = &opened.param;
        let unreadable = |error| faults::unreadable(error, place, param, role);
        if dtype == Dtype::E4M3 {
            let Some(fp8) = self.reader.fp8(&tensor).map_err(unreadable)? else {
                let error = PyTypeError::new_err("it is no Float8Tensor, but the optimizer's options call for fp8");
                return Err(unreadable(error));
            };
            fp8.dicts.into_iter().flatten().for_each(|[owner, dict]| self.trails.note_dict(owner, dict));
            let view = View { dtype: fp8.dtype, ..self.noted_view(outer, &fp8.data, place, param, role)? };
            let factor = self.scale_of(place, opened, role)?;
            let mut one = |name, tensor| self.number(name, tensor, view.device).map_err(unreadable);
            let scaling = Scaling {
                factor: one("a scale", &factor)?,
                scale: one("an fp8 scale", &fp8.scale)?,
                scale_inv: one("an fp8 scale_inv", &fp8.scale_inv)?,
                amax: one("an fp8 amax", &fp8.amax)?,
            };
            if fp8.transposed && view.numel > 0 {
                self.aftermath.transposed.push(tensor);
            }
            return Ok(State { tensor: fp8.data, view, scaling: Some(scaling) });
        }
        if self.reader.kind(&tensor)? == Kind::Wrapped {
            return Err(unreadable(PyTypeError::new_err("it is no plain tensor")));
        }
        let view = self.noted_view(outer, &tensor, place, param, role)?;
        let mut scaling = None;
        if dtype == Dtype::F16 {
            let factor = self.scale_of(place, opened, role)?;
            let factor = self.number("a scale", &factor, view.device).map_err(unreadable)?;
            scaling = Some(Scaling { factor, ..Scaling::default() });
        }
        Ok(State { tensor, view, scaling })
    }

    /// Address of the one fp32 number of a tensor that scales another.
    fn number(&mut self, name: &str, tensor: &Bound<'py, PyAny>, device: Device) -> PyResult<u64> {
        let (view, kind) = self.reader.view_alike(tensor, self.kinds, self.trails.kind())?;
        self.reader.check_one(name, tensor, &view, Dtype::F32, device)?;
        let object = tensor.as_ptr() as u64;
        self.trails.note(object, object, view.record, self.reader.record_at(), kind);
        Ok(view.address)
    }

    /// `optimizer._scales[param][name]`.
    fn scale_of(&mut self, place: Place, opened: &Opened<'py>, role: Role) -> PyResult<Bound<'py, PyAny>> {
        let scale = match &opened.scales {
            Some(scales) => scales.get_item(state_keys(scales.py())[role as usize - Role::ExpAvg as usize])?,
            None => None,
        };
        scale.ok_or_else(|| {
            let param = faults::name(place, &opened.param);
            PyKeyError::new_err(format!("{}: the scale of this state of {param} is missing", role.name()))
        })
    }

    /// The fp32 value that a quantized parameter is made of after the update: its fp32 master, updated in place, or an
    /// fp32 tensor beside its fp16 master.
    fn value_of(
        &mut self,
        place: Place,
        param: &Bound<'py, PyAny>,
        quantized: Bound<'py, PyAny>,
        master: Option<State<'py>>,
    ) -> PyResult<(Value<'py>, Option<State<'py>>)> {
        let py = param.py();
        let master = master.ok_or_else(|| PyRuntimeError::new_err("the master was not read"))?;
        if self.switches.master != Dtype::F16 {
            if master.view.numel > 0 {
                self.aftermath.quantized.push((quantized, master.tensor.call_method0("detach")?));
            }
            let State { tensor, view, .. } = master;
            return Ok((Value { tensor, view, scaling: None, quantized: None }, None));
        }
        let torch = py.import("torch")?;
        let arguments = PyDict::new(py);
        arguments.set_item("dtype", torch.getattr("float32")?)?;
        let value = torch.call_method("empty_like", (master.tensor.call_method0("detach")?,), Some(&arguments))?;
        let view = self.view(&value, place, param, Role::Param)?;
        if view.numel > 0 {
            self.aftermath.quantized.push((quantized, value.clone()));
        }
        Ok((Value { tensor: value, view, scaling: None, quantized: None }, Some(master)))
    }

    /// Puts contiguous copies in the place of tensors that are not contiguous.
    fn stage(
        &mut self,
        place: Place,
        param: &Bound<'py, PyAny>,
        column: Column,
        tensors: [Option<Bound<'py, PyAny>>; 5],
    ) -> PyResult<Work> {
        let dtypes =
            [column.grad, column.param, column.exp_avg, column.exp_avg_sq, column.master.unwrap_or(column.param)];
        let mut views = [None; 5];
        for ((at, tensor), role) in tensors.into_iter().enumerate().zip(Role::ALL) {
            let Some(original) = tensor else { continue };
            let copy = original.call_method0("detach")?.call_method0("contiguous")?;
            let view = View { dtype: dtypes[at].dtype, ..self.view(&copy, place, param, role)? };
            views[at] = Some(view);
            if view.address != self.view(&original, place, param, role)?.address {
                if role != Role::Grad || self.switches.capturable {
                    self.aftermath.copies.push((original, copy));
                } else {
                    self.aftermath.held.push(copy);
                }
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
