//! UNSAFE: reads torch objects into plain data. The one place that touches Python objects through C.
//! Knows nothing of plans and kernels. Invariant: it keeps no tensor beyond the step it reads for, and every object it
//! touches is held by a strong reference while it does, or, where it says borrowed, by the list or dict it came from.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use dlpack_rs::ffi::{DLDataTypeCode, DLDeviceType, DLPackExchangeAPI, DLTensor};
use pyo3::exceptions::{PyAttributeError, PyRuntimeError, PyTypeError};
use pyo3::ffi as c;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyList, PyString, PyTuple, PyType};

use crate::python::prefetch::{self, RecordAt};
use crate::python::recall::{GradAt, Kinds, Recall, UNKNOWN};
use crate::python::shim::Shim;
use crate::python::sweep::KnownClass;
use crate::tensor::{Device, Dtype, View};

/// What a tensor's class says of how to read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Elements at its own address.
    Plain,
    /// Elements in `_local_tensor`.
    Sharded,
    /// A wrapper with an inside of its own, such as a quantized tensor; or no tensor at all.
    Wrapped,
}

type DescrGet = unsafe extern "C" fn(*mut c::PyObject, *mut c::PyObject, *mut c::PyObject) -> *mut c::PyObject;

/// A class's data descriptor for one attribute, called without a lookup: three times faster than `getattr`.
struct Getter<'py> {
    descriptor: Bound<'py, PyAny>,
    get: DescrGet,
}

impl<'py> Getter<'py> {
    /// The descriptor that `getattr(instance, name)` would call, if it takes precedence over the instance's dict.
    fn find(class: &Bound<'py, PyType>, name: &Bound<'py, PyString>) -> PyResult<Option<Getter<'py>>> {
        for base in class.getattr(intern!(class.py(), "__mro__"))?.cast::<PyTuple>()?.iter() {
            let attributes = base.getattr(intern!(base.py(), "__dict__"))?;
            // Asked first, since to raise and drop an exception takes longer.
            if !attributes.contains(name)? {
                continue;
            }
            let descriptor = attributes.get_item(name)?;
            let kind = descriptor.get_type();
            // SAFETY: the class is live; slots of a static or heap type may be read since Python 3.10.
            let (get, set) = unsafe {
                let kind = kind.as_type_ptr();
                (c::PyType_GetSlot(kind, c::Py_tp_descr_get), c::PyType_GetSlot(kind, c::Py_tp_descr_set))
            };
            if get.is_null() || set.is_null() {
                return Ok(None);
            }
            // SAFETY: the slot tp_descr_get holds a function of this type.
            let get = unsafe { std::mem::transmute::<*mut c_void, DescrGet>(get) };
            return Ok(Some(Getter { descriptor, get }));
        }
        Ok(None)
    }

    fn call(&self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: descriptor, object and its type are live; the function returns a new reference or sets an exception.
        unsafe {
            let class = c::Py_TYPE(object.as_ptr()).cast();
            let value = (self.get)(self.descriptor.as_ptr(), object.as_ptr(), class);
            Bound::from_owned_ptr_or_err(object.py(), value)
        }
    }
}

/// What is known of one class, for the length of a step.
struct Class<'py> {
    class: Bound<'py, PyType>,
    kind: Kind,
    grad: Option<Getter<'py>>,
    local: Option<Getter<'py>>,
    /// Where its objects point at their local tensors, once one was seen.
    slot: Option<u64>,
}

/// torch's objects, looked up once per process.
pub struct Torch {
    exchange: Option<Exchange>,
    shim: Option<Shim>,
    recall: Option<Recall>,
    /// torch's descriptor of a tensor's gradient.
    grad: Py<PyAny>,
    tensor: Py<PyType>,
    dtypes: [(Py<PyAny>, Dtype); 9],
    plain_dispatch: Py<PyAny>,
    current_raw_stream: Py<PyAny>,
    /// The module that knows whether torch's profiler runs.
    profiler: Py<PyAny>,
    disable_torch_function: Py<PyAny>,
    /// The modules that are imported by now.
    modules: Py<PyDict>,
}

/// torch's DLPack exchange table (torch 2.10 and later), which lives as long as the process.
struct Exchange(*const DLPackExchangeAPI);

// SAFETY: the table is constant.
unsafe impl Send for Exchange {}
// SAFETY: the table is constant.
unsafe impl Sync for Exchange {}

impl Torch {
    /// The process's torch.
    pub fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        // SAFETY of the lifetime: a static is never dropped.
        TORCH.get_or_try_init(py, || Torch::find(py))
    }

    fn find(py: Python<'_>) -> PyResult<Torch> {
        let torch = py.import("torch")?;
        let dtype = |name, dtype| PyResult::Ok((torch.getattr(name)?.unbind(), dtype));
        let native = py.import("torch._C")?;
        let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
        let exchange = match tensor.getattr("__dlpack_c_exchange_api__") {
            Ok(capsule) => Exchange::from_capsule(capsule.cast::<PyCapsule>()?),
            Err(_) => None,
        };
        let current_raw_stream = match native.getattr("_cuda_getCurrentRawStream") {
            Ok(function) => function.unbind(),
            Err(_) => py.None(),
        };
        // A torch that keeps it elsewhere is asked for gradients.
        let grad = tensor.getattr("__base__").and_then(|base| base.getattr("__dict__")?.get_item("grad"));
        let grad = grad.map_or_else(|_| py.None(), Bound::unbind);
        let mut torch = Torch {
            exchange,
            shim: None,
            recall: None,
            grad,
            tensor: tensor.unbind(),
            dtypes: [
                dtype("float32", Dtype::F32)?,
                dtype("float16", Dtype::F16)?,
                dtype("bfloat16", Dtype::BF16)?,
                dtype("int16", Dtype::I16)?,
                dtype("int32", Dtype::I32)?,
                dtype("uint8", Dtype::U8)?,
                dtype("float8_e4m3fn", Dtype::E4M3)?,
                dtype("float8_e5m2", Dtype::E5M2)?,
                dtype("float64", Dtype::F64)?,
            ],
            plain_dispatch: native.getattr("_disabled_torch_dispatch_impl")?.unbind(),
            current_raw_stream,
            profiler: py.import("torch.autograd.profiler")?.into_any().unbind(),
            disable_torch_function: native.getattr("DisableTorchFunctionSubclass")?.unbind(),
            modules: py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?.unbind(),
        };
        // A torch that cannot make a probe is read without what the probes would have shown.
        let probes = probes(py).unwrap_or_default();
        let views: PyResult<Vec<View>> = probes.iter().map(|probe| torch.told_view(probe)).collect();
        torch.shim = views.ok().and_then(|views| Shim::find(py, &probes, &views));
        torch.recall = torch.shim.as_ref().and_then(|shim| {
            let views = probes.iter().map(|probe| shim.view(probe)).collect::<Option<Vec<View>>>()?;
            let at = shim.record_at();
            Recall::find(at, &probes, &views, &strangers(py).ok()?, find_grads(py, at).ok()?)
        });
        Ok(torch)
    }

    /// Our name of a `torch.dtype`.
    pub fn dtype(&self, dtype: &Bound<'_, PyAny>) -> Dtype {
        let found = self.dtypes.iter().find(|(object, _)| object.is(dtype));
        found.map_or(Dtype::Other, |&(_, dtype)| dtype)
    }

    /// The view that torch tells through DLPack, or, before 2.10, by the tensor's attributes.
    fn told_view(&self, tensor: &Bound<'_, PyAny>) -> PyResult<View> {
        match &self.exchange {
            Some(exchange) => view_by_exchange(exchange, tensor),
            None => self.view_by_attributes(tensor),
        }
    }

    fn view_by_attributes(&self, tensor: &Bound<'_, PyAny>) -> PyResult<View> {
        let py = tensor.py();
        let address: u64 = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let shape: Vec<i64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<i64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let dtype = self.dtype(&tensor.getattr(intern!(py, "dtype"))?);
        Ok(View::new(address, &shape, &strides, dtype, self.device_of(tensor)?))
    }

    fn device_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Device> {
        let py = tensor.py();
        let device = tensor.getattr(intern!(py, "device"))?;
        Ok(match device.getattr(intern!(py, "type"))?.extract::<String>()?.as_str() {
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda(device.getattr(intern!(py, "index"))?.extract()?),
            _ => Device::Other,
        })
    }

    /// Whether torch's profiler runs; a torch that does not tell has none.
    pub fn profiler_runs(&self, py: Python<'_>) -> bool {
        let flag = self.profiler.bind(py).getattr(intern!(py, "_is_profiler_enabled"));
        flag.and_then(|flag| flag.is_truthy()).unwrap_or(false)
    }

    /// Handle of torch's current stream on a CUDA device.
    pub fn current_stream(&self, py: Python<'_>, device: u16) -> PyResult<u64> {
        self.current_raw_stream.bind(py).call1((device,))?.extract()
    }
}

impl Exchange {
    fn from_capsule(capsule: &Bound<'_, PyCapsule>) -> Option<Exchange> {
        let pointer = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
        let table: *const DLPackExchangeAPI = pointer.as_ptr().cast();
        // SAFETY: torch's capsule of this name holds such a table, alive as long as the process; its header may be read
        // whatever the version.
        let (version, view) = unsafe { ((*table).header.version.major, (*table).dltensor_from_py_object_no_sync) };
        (version == 1 && view.is_some()).then_some(Exchange(table))
    }
}

/// CPU tensors of every dtype that kernels take and of several layouts.
fn probes(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let torch = py.import("torch")?;
    let mut probes = Vec::new();
    for name in [
        "float32",
        "float16",
        "bfloat16",
        "int16",
        "int32",
        "uint8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float64",
        "int64",
    ] {
        let arguments = PyDict::new(py);
        arguments.set_item("dtype", torch.getattr(name)?)?;
        arguments.set_item("device", "cpu")?;
        probes.push(torch.call_method("empty", ((3, 5),), Some(&arguments))?);
    }
    let base = torch.call_method1("empty", ((3, 5),))?.call_method1("to", ("cpu",))?;
    probes.push(base.call_method0("t")?);
    probes.push(base.call_method1("narrow", (1, 2, 2))?);
    probes.push(base.call_method1("narrow", (0, 0, 0))?);
    probes.push(base.call_method1("reshape", ((1, 1, 3, 5, 1),))?);
    probes.push(base.call_method0("sum")?);
    probes.push(torch.getattr("nn")?.getattr("Parameter")?.call1((base,))?);
    Ok(probes)
}

/// Tensors unlike the probes in what their views do not say: on no device, negated when read, copied when written.
fn strangers(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    let torch = py.import("torch")?;
    let base = || torch.call_method1("empty", ((3, 5),))?.call_method1("to", ("cpu",));
    let mut strangers = vec![base()?.call_method1("to", ("meta",))?];
    for name in ["_neg_view", "_lazy_clone"] {
        if let Ok(function) = torch.getattr(name) {
            strangers.push(function.call1((base()?,))?);
        }
    }
    Ok(strangers)
}

/// The way to gradients, looked at in parameters that have one and in some that have none.
fn find_grads(py: Python<'_>, at: RecordAt) -> PyResult<Option<GradAt>> {
    let torch = py.import("torch")?;
    let tensor = || torch.call_method1("empty", ((3, 5),))?.call_method1("to", ("cpu",));
    let param = || torch.getattr("nn")?.getattr("Parameter")?.call1((tensor()?,));
    let (bare, graded) = ([param()?, param()?], [param()?, param()?]);
    let mut pairs = Vec::new();
    for param in &graded {
        let grad = tensor()?;
        param.setattr("grad", &grad)?;
        pairs.push((param, grad));
    }
    let pairs: Vec<[u64; 2]> = pairs.iter().map(|(p, grad)| [p.as_ptr() as u64, grad.as_ptr() as u64]).collect();
    Ok(GradAt::find(at, &pairs, &bare.each_ref().map(|param| param.as_ptr() as u64)))
}

/// The view of a tensor through DLPack.
fn view_by_exchange(exchange: &Exchange, tensor: &Bound<'_, PyAny>) -> PyResult<View> {
    let mut out = MaybeUninit::<DLTensor>::zeroed();
    // SAFETY: the table is torch's, the object a live torch.Tensor; `out` is a DLTensor to be filled. On 0 it is
    // filled, with shape and strides that live as long as the tensor, which `tensor` holds.
    unsafe {
        let Some(fill) = (*exchange.0).dltensor_from_py_object_no_sync else {
            return Err(PyRuntimeError::new_err("torch's DLPack table makes no views"));
        };
        if fill(tensor.as_ptr().cast(), out.as_mut_ptr()) != 0 {
            return Err(PyErr::fetch(tensor.py()));
        }
        let out = out.assume_init();
        let slice = |pointer: *mut i64| {
            if out.ndim == 0 { &[][..] } else { std::slice::from_raw_parts(pointer, out.ndim as usize) }
        };
        let dtype = match (u32::from(out.dtype.code), out.dtype.bits, out.dtype.lanes) {
            (DLDataTypeCode::kDLFloat, 32, 1) => Dtype::F32,
            (DLDataTypeCode::kDLFloat, 64, 1) => Dtype::F64,
            (DLDataTypeCode::kDLFloat, 16, 1) => Dtype::F16,
            (DLDataTypeCode::kDLBfloat, 16, 1) => Dtype::BF16,
            (DLDataTypeCode::kDLInt, 16, 1) => Dtype::I16,
            (DLDataTypeCode::kDLInt, 32, 1) => Dtype::I32,
            (DLDataTypeCode::kDLUInt, 8, 1) => Dtype::U8,
            (DLDataTypeCode::kDLFloat8_e4m3fn, 8, 1) => Dtype::E4M3,
            (DLDataTypeCode::kDLFloat8_e5m2, 8, 1) => Dtype::E5M2,
            _ => Dtype::Other,
        };
        let device = match out.device.device_type {
            DLDeviceType::kDLCPU | DLDeviceType::kDLCUDAHost => Device::Cpu,
            DLDeviceType::kDLCUDA => Device::Cuda(out.device.device_id as u16),
            _ => Device::Other,
        };
        let (shape, strides) = (slice(out.shape), slice(out.strides));
        let empty = shape.contains(&0);
        let address = if empty { 0 } else { out.data as u64 + out.byte_offset };
        Ok(View { record: out.shape as u64, ..View::new(address, shape, strides, dtype, device) })
    }
}

/// How this torch's tensors are read: by the words of its "records", which is fastest; else in full by its stable C
/// "functions", through "dlpack", or by their "attributes".
#[pyfunction]
pub fn tensors_read_by(py: Python<'_>) -> PyResult<&'static str> {
    Ok(match Torch::get(py)? {
        Torch { recall: Some(_), .. } => "records",
        Torch { shim: Some(_), .. } => "functions",
        Torch { exchange: Some(_), .. } => "dlpack",
        _ => "attributes",
    })
}

/// Reads tensors during one step.
pub struct Reader<'py> {
    py: Python<'py>,
    torch: &'static Torch,
    dtensor: Option<Bound<'py, PyType>>,
    classes: Vec<Class<'py>>,
    /// While it lives, torch does not look for `__torch_function__` on the classes of tensors, which costs more than
    /// reading them. Classes whose override matters are `Kind::Wrapped` and not read.
    _plain_attributes: PlainAttributes<'py>,
}

/// torch's context manager, entered.
struct PlainAttributes<'py>(Bound<'py, PyAny>);

impl<'py> PlainAttributes<'py> {
    fn enter(py: Python<'py>, torch: &Torch) -> PyResult<PlainAttributes<'py>> {
        let guard = torch.disable_torch_function.bind(py).call0()?;
        guard.call_method0(intern!(py, "__enter__"))?;
        Ok(PlainAttributes(guard))
    }
}

impl Drop for PlainAttributes<'_> {
    fn drop(&mut self) {
        let py = self.0.py();
        let exited = self.0.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()));
        if let Err(error) = exited {
            error.write_unraisable(py, Some(&self.0));
        }
    }
}

impl<'py> Reader<'py> {
    /// A reader for one step.
    pub fn new(py: Python<'py>) -> PyResult<Reader<'py>> {
        let torch = Torch::get(py)?;
        // Without the module no DTensor can exist; importing it would cost every user who has none.
        let dtensor = match torch.modules.bind(py).get_item(intern!(py, "torch.distributed.tensor"))? {
            Some(module) => {
                module.getattr(intern!(py, "DTensor")).ok().map(|class| class.cast_into::<PyType>()).transpose()?
            }
            None => None,
        };
        Ok(Reader { py, torch, dtensor, classes: Vec::new(), _plain_attributes: PlainAttributes::enter(py, torch)? })
    }

    fn class(&mut self, object: &Bound<'py, PyAny>) -> PyResult<usize> {
        // SAFETY: the object is live, and so is its class.
        let class = unsafe { c::Py_TYPE(object.as_ptr()) };
        if let Some(at) = self.classes.iter().position(|known| known.class.as_type_ptr() == class) {
            return Ok(at);
        }
        self.look_at(object.get_type(), None)
    }

    /// Looks at a class whose objects point at their local tensors at `slot`, if that is known; its place in `classes`.
    fn look_at(&mut self, class: Bound<'py, PyType>, slot: Option<u64>) -> PyResult<usize> {
        let kind = if !class.is_subclass(self.torch.tensor.bind(self.py))? {
            Kind::Wrapped
        } else if self.dtensor.as_ref().is_some_and(|dtensor| class.is_subclass(dtensor).unwrap_or(false)) {
            Kind::Sharded
        } else if class.getattr(intern!(self.py, "__torch_dispatch__"))?.is(&self.torch.plain_dispatch) {
            Kind::Plain
        } else {
            Kind::Wrapped
        };
        let grad = Getter::find(&class, intern!(self.py, "grad"))?;
        let local = match kind {
            Kind::Sharded => Getter::find(&class, intern!(self.py, "_local_tensor"))?,
            _ => None,
        };
        self.classes.push(Class { class, kind, grad, local, slot });
        Ok(self.classes.len() - 1)
    }

    /// Where words lie in torch's records, if that was found out.
    pub fn recall(&self) -> Option<Recall> {
        self.torch.recall
    }

    /// Where tensors' objects point at torch's records, for hints to the processor.
    pub fn record_at(&self) -> Option<RecordAt> {
        Some(self.torch.recall?.record_at())
    }

    /// Looks again at classes that were met before.
    pub fn look_again(&mut self, classes: &[(Py<PyType>, Option<u64>)]) -> PyResult<()> {
        classes.iter().try_for_each(|(class, slot)| self.look_at(class.bind(self.py).clone(), *slot).map(|_| ()))
    }

    /// The classes that were met, as `look_again` takes them.
    pub fn classes(&self) -> Vec<(Py<PyType>, Option<u64>)> {
        self.classes.iter().map(|class| (class.class.clone().unbind(), class.slot)).collect()
    }

    /// The classes that were met.
    pub fn known_classes(&self) -> Vec<KnownClass> {
        let known = |class: &Class<'py>| {
            let whole = match class.kind {
                Kind::Plain => true,
                Kind::Sharded => class.slot.is_some() && class.local.is_some(),
                Kind::Wrapped => false,
            };
            let graded = class.grad.as_ref().is_some_and(|grad| grad.descriptor.is(&self.torch.grad));
            KnownClass { class: class.class.as_ptr() as u64, whole, slot: class.slot.filter(|_| whole), graded }
        };
        self.classes.iter().map(known).collect()
    }

    /// Whether any tensor that was met has an inside of its own.
    pub fn met_wrapped(&self) -> bool {
        self.classes.iter().any(|class| class.kind == Kind::Wrapped)
    }

    /// Our name of a `torch.dtype`.
    pub fn dtype(&self, dtype: &Bound<'py, PyAny>) -> Dtype {
        self.torch.dtype(dtype)
    }

    /// Whether an object is a torch.Tensor.
    pub fn is_tensor(&self, object: &Bound<'py, PyAny>) -> PyResult<bool> {
        object.is_instance(self.torch.tensor.bind(self.py))
    }

    /// How to read a tensor.
    pub fn kind(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Kind> {
        let at = self.class(tensor)?;
        Ok(self.classes[at].kind)
    }

    /// A tensor's gradient: `.grad`, or `.decoupled_grad` where a missing attribute means none.
    pub fn grad(&mut self, param: &Bound<'py, PyAny>, decoupled: bool) -> PyResult<Option<Bound<'py, PyAny>>> {
        let grad = if decoupled {
            match param.getattr(intern!(self.py, "decoupled_grad")) {
                Err(error) if error.is_instance_of::<PyAttributeError>(self.py) => return Ok(None),
                grad => grad?,
            }
        } else {
            let at = self.class(param)?;
            match &self.classes[at].grad {
                Some(getter) => getter.call(param)?,
                None => param.getattr(intern!(self.py, "grad"))?,
            }
        };
        Ok((!grad.is_none()).then_some(grad))
    }

    /// The tensor that holds the elements, and the outer and inner kinds; the tensor itself unless it is sharded.
    pub fn local(&mut self, tensor: Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Kind, Kind)> {
        let at = self.class(&tensor)?;
        let class = &self.classes[at];
        if class.kind != Kind::Sharded {
            let kind = class.kind;
            return Ok((tensor, kind, kind));
        }
        let local = match &class.local {
            Some(getter) => getter.call(&tensor)?,
            None => tensor.getattr(intern!(self.py, "_local_tensor"))?,
        };
        let inner = self.kind(&local)?;
        let slot = &mut self.classes[at].slot;
        if slot.is_none() {
            let bytes = tensor.get_type().getattr(intern!(self.py, "__basicsize__"))?.extract()?;
            *slot = prefetch::slot(tensor.as_ptr() as u64, bytes, local.as_ptr() as u64);
        }
        Ok((local, Kind::Sharded, inner))
    }

    /// Address, shape, strides, dtype and device of a plain tensor.
    pub fn view(&self, tensor: &Bound<'py, PyAny>) -> PyResult<View> {
        let fast = self.torch.shim.as_ref().and_then(|shim| shim.view(tensor));
        let view = match fast {
            Some(view) => view,
            None => self.torch.told_view(tensor)?,
        };
        // A view into a released storage reports its offset as its address; real addresses this low are rare enough
        // to ask about.
        if view.numel > 0 && view.address < LOW_ADDRESS {
            self.check_storage(tensor)?;
        }
        Ok(view)
    }

    /// As `view`, of a tensor that is likely to be of the kind of this number; with the number of its kind.
    pub fn view_alike(&self, tensor: &Bound<'py, PyAny>, kinds: &mut Kinds, number: u32) -> PyResult<(View, u32)> {
        if let Some(view) = self.recalled(tensor, kinds, number) {
            return Ok((view, number));
        }
        // Its elements are the negatives of what lies in memory.
        if tensor.call_method0(intern!(self.py, "is_neg"))?.is_truthy()? {
            return Err(PyRuntimeError::new_err("it is a lazily negated view; give its resolve_neg()"));
        }
        let view = self.view(tensor)?;
        Ok((view, self.torch.recall.as_ref().map_or(UNKNOWN, |recall| kinds.learn(recall, tensor, &view))))
    }

    /// The view of a live `torch.Tensor` if it is of the kind of this number.
    pub fn recalled(&self, tensor: &Bound<'py, PyAny>, kinds: &Kinds, number: u32) -> Option<View> {
        kinds.view(self.torch.recall.as_ref()?, number, tensor)
    }

    /// As `view`, of a tensor whose elements are not needed: its storage may have been released.
    pub fn shape_view(&self, tensor: &Bound<'py, PyAny>) -> PyResult<View> {
        match self.torch.shim.as_ref().and_then(|shim| shim.view(tensor)) {
            Some(view) => Ok(view),
            None => self.torch.view_by_attributes(tensor),
        }
    }

    /// Shape and device of a tensor whose elements are not its own: at no address.
    pub fn wrapper_view(&self, tensor: &Bound<'py, PyAny>) -> PyResult<View> {
        let shape: Vec<i64> = tensor.getattr(intern!(self.py, "shape"))?.extract()?;
        let mut strides = vec![1; shape.len()];
        for at in (1..shape.len()).rev() {
            strides[at - 1] = strides[at] * shape[at].max(1);
        }
        Ok(View::new(0, &shape, &strides, Dtype::Other, self.torch.device_of(tensor)?))
    }

    /// A tensor of one element. TypeError for another.
    pub fn one(&self, name: &str, tensor: &Bound<'py, PyAny>, dtype: Dtype, device: Device) -> PyResult<View> {
        let view = self.view(tensor)?;
        self.check_one(name, tensor, &view, dtype, device)?;
        Ok(view)
    }

    /// Refuses a tensor whose view is not that of one element.
    pub fn check_one(
        &self,
        name: &str,
        tensor: &Bound<'py, PyAny>,
        view: &View,
        dtype: Dtype,
        device: Device,
    ) -> PyResult<()> {
        if view.numel == 1 && view.dtype == dtype && view.device == device {
            return Ok(());
        }
        Err(PyTypeError::new_err(format!(
            "FusedAdam takes {name} as a tensor of one torch.{} on {device}, got {} of shape {} on {}",
            dtype.torch_name(),
            tensor.getattr("dtype")?,
            tensor.getattr("shape")?,
            tensor.getattr("device")?
        )))
    }

    fn check_storage(&self, tensor: &Bound<'py, PyAny>) -> PyResult<()> {
        let storage = tensor.call_method0("untyped_storage")?;
        if storage.call_method0("data_ptr")?.extract::<u64>()? == 0 {
            let shape = tensor.getattr("shape")?;
            return Err(PyRuntimeError::new_err(format!(
                "FusedAdam: a tensor of shape {shape} has no memory (its storage was released); \
                 bring it back before the step"
            )));
        }
        Ok(())
    }
}

/// How many references to an object there are.
pub fn references(object: &Bound<'_, PyAny>) -> isize {
    // SAFETY: the object is live.
    unsafe { c::Py_REFCNT(object.as_ptr()) }
}

/// Addresses of a list's items, which it keeps alive as long as it is not changed.
pub fn borrowed_items(list: &Bound<'_, PyList>) -> impl Iterator<Item = u64> {
    // SAFETY: the list is live and has this item, which is not read.
    (0..list.len()).map(|index| unsafe { c::PyList_GetItem(list.as_ptr(), index as c::Py_ssize_t) } as u64)
}

/// The values of a dict under keys that are these very objects, kept alive by the dict as long as it is not changed; no
/// code of Python's runs.
///
/// # Safety
/// `dict` must be a live dict.
pub unsafe fn borrowed_values<const N: usize>(dict: u64, keys: &[Bound<'_, PyString>; N]) -> [Option<u64>; N] {
    let mut values = [None; N];
    let mut position = 0;
    let (mut key, mut value): (*mut c::PyObject, *mut c::PyObject) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the caller's promise; key and value are borrowed and used before anything else can run.
    while unsafe { c::PyDict_Next(dict as *mut c::PyObject, &mut position, &mut key, &mut value) } != 0 {
        if let Some(at) = keys.iter().position(|name| name.as_ptr() == key) {
            values[at] = Some(value as u64);
        }
    }
    values
}

/// Keys of a parameter's state.
pub fn state_keys(py: Python<'_>) -> [&Bound<'_, PyString>; 3] {
    [intern!(py, "exp_avg"), intern!(py, "exp_avg_sq"), intern!(py, "master_param")]
}

/// The values of a parameter's state under `state_keys`, which usually are its keys in this order. They are kept alive by
/// the dict as long as it is not changed; no code of Python's runs.
pub fn borrowed_entries(state: &Bound<'_, PyDict>) -> [Option<u64>; 3] {
    const KEYS: [&CStr; 3] = [c"exp_avg", c"exp_avg_sq", c"master_param"];
    let known = state_keys(state.py());
    let mut values = [None; 3];
    let mut position = 0;
    let (mut key, mut value): (*mut c::PyObject, *mut c::PyObject) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the dict is live; key and value are borrowed and used before anything else can run.
    while unsafe { c::PyDict_Next(state.as_ptr(), &mut position, &mut key, &mut value) } != 0 {
        let at = known.iter().position(|name| name.as_ptr() == key).or_else(|| {
            // A loaded file has keys that are equal but not the same object.
            // SAFETY: the key is a live str.
            let equal = |name: &&CStr| unsafe { c::PyUnicode_CompareWithASCIIString(key, name.as_ptr()) == 0 };
            // SAFETY: the key is live.
            let text = unsafe { c::PyUnicode_Check(key) != 0 };
            text.then(|| KEYS.iter().position(equal)).flatten()
        });
        if let Some(at) = at {
            values[at] = Some(value as u64);
        }
    }
    values
}

/// As `borrowed_entries`, held.
pub fn state_entries<'py>(state: &Bound<'py, PyDict>) -> [Option<Bound<'py, PyAny>>; 3] {
    // SAFETY: the dict holds the entry, and nothing has run since it was read.
    let held = |object| unsafe { Bound::from_borrowed_ptr(state.py(), object as *mut c::PyObject) };
    borrowed_entries(state).map(|entry| entry.map(held))
}

/// Entries of a dict that a walk steps over before it asks the dict.
const STEPPED_OVER: usize = 8;

/// Below a tebibyte; user-space addresses of the CUDA driver and of mapped host memory lie above.
const LOW_ADDRESS: u64 = 1 << 40;

/// Walks an optimizer's `state`, or another dict whose order is usually that of the parameters, so that no lookup needs
/// to hash.
pub struct StateWalk<'py> {
    state: Bound<'py, PyDict>,
    position: c::Py_ssize_t,
    /// The entry before `position`.
    last: Option<(u64, Bound<'py, PyAny>)>,
}

impl<'py> StateWalk<'py> {
    /// A walk from the first entry.
    pub fn new(state: Bound<'py, PyDict>) -> StateWalk<'py> {
        StateWalk { state, position: 0, last: None }
    }

    /// The entry of the parameter at this address if it is among the next ones; no code of Python's runs.
    pub fn step(&mut self, param: u64) -> Option<Bound<'py, PyAny>> {
        let py = self.state.py();
        if let Some((key, value)) = &self.last
            && *key == param
        {
            return Some(value.clone());
        }
        let mut position = self.position;
        let (mut key, mut value): (*mut c::PyObject, *mut c::PyObject) = (ptr::null_mut(), ptr::null_mut());
        // Entries that nobody asked for are stepped over.
        for _ in 0..STEPPED_OVER {
            // SAFETY: the dict is live; key and value are borrowed and used before anything else can run.
            let found: c_int = unsafe { c::PyDict_Next(self.state.as_ptr(), &mut position, &mut key, &mut value) };
            if found == 0 {
                break;
            }
            if key as u64 == param {
                self.position = position;
                // SAFETY: the dict holds the value, and nothing has run since.
                let value = unsafe { Bound::from_borrowed_ptr(py, value) };
                self.last = Some((param, value.clone()));
                return Some(value);
            }
        }
        None
    }

    /// The entry of `param`, or `None`.
    pub fn get(&mut self, param: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.step(param.as_ptr() as u64) {
            Some(value) => Ok(Some(value)),
            None => self.state.get_item(param),
        }
    }
}
